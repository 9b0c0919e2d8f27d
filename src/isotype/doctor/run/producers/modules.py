"""Continues the search in a module that returned a tensor: in its hooks, weights and forward."""

from __future__ import annotations

import ast
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..arguments import list_parameters
from ..autocast import find_output_cast
from ..bindings import iterate_returned_values
from ..expressions import is_tensor, read_function
from ..frames import make_returned_frame, source_text
from ..hooks import describe_hook
from ..modules import floating_weight_dtypes
from ..producer import Producer
from .autocast import follow_autocast
from .functions import follow_returned
from .search import Search


def follow_module(
    search: Search, module: nn.Module, node: ast.Call, index: int, line: int
) -> Producer:
    """Continues the search at a call of a module: in its forward hooks, in its weights, in the
    forward of a class of the user's code, and for a module without weights at its input.
    """
    path = search.names.module_path(module)
    result = follow_hooks(search, module, "forward hook", index)
    if result is not None:
        return result
    output_cast = find_output_cast(module, search.frames[: search.running_count])
    if output_cast and search.dtype == torch.float32:
        result = search.producer("autocast", node, index, path=path, is_proven=True)
        return replace(result, reason=output_cast)
    dtypes = floating_weight_dtypes(module)
    if dtypes == {search.dtype}:
        return search.producer("module", node, index, path=path, module=module, is_proven=True)
    if isinstance(module, nn.Sequential):
        computed = follow_autocast(search, node, index, line)
        return computed or follow_sequential(search, module, node, index, line)
    forward = MethodType(type(module).forward, module)
    result = follow_returned(search, forward, node, index, line)
    if result is None:
        result = follow_autocast(search, node, index, line)
    if result is not None:
        return result
    is_weightless = not dtypes and type(module).__module__.startswith("torch.nn")
    if node.args:
        # its weights do not have the dtype, so its input may have it
        count = len(search.promotions)
        result = search.follow(node.args[0], index, line)
        if is_weightless or result.is_proven:
            return result
        del search.promotions[count:]
    return search.producer("module", node, index, path=path, module=module)


def follow_sequential(
    search: Search, module: nn.Sequential, node: ast.Call, index: int, line: int
) -> Producer:
    for child in reversed(module):
        result = follow_hooks(search, child, "forward hook", index)
        if result is not None:
            return result
        dtypes = floating_weight_dtypes(child)
        if not dtypes:
            continue
        path = search.names.module_path(child)
        is_proven = dtypes == {search.dtype}
        if not is_proven:
            forward = MethodType(type(child).forward, child)
            result = follow_returned(search, forward, None, index, line)
            if result is not None:
                return result
            path = search.names.module_path(module)
            child = module
        return search.producer("module", node, index, path=path, module=child, is_proven=is_proven)
    if node.args:
        return search.follow(node.args[0], index, line)
    return search.producer("module", node, index, module=module)


def follow_hooks(search: Search, module: nn.Module, kind: str, index: int) -> Producer | None:
    """Searches the hooks of a module in the user's code, the last one first. `kind` is
    `forward hook` or `forward pre-hook`.
    """
    hooks = module._forward_hooks if kind == "forward hook" else module._forward_pre_hooks
    for hook in reversed(list(hooks.values())):
        result = follow_returned(search, hook, None, index)
        if result is not None:
            path = search.names.module_path(module)
            files = [frame.file for frame in search.frames if frame.is_user_code]
            text = describe_hook(hook, kind, path, files)
            return replace(result, hook=text)
    return None


def follow_previous_layer(search: Search, index: int) -> Producer | None:
    """If a loop calls the layers of a model one after another, also searches the hooks of the
    previous layer, because its result is the input of the running layer.
    """
    frame = search.frames[index]
    call = frame.expression
    if index >= search.running_count or not isinstance(call, ast.Call):
        return None
    layer = read_function(call.func, frame)
    previous = search.names.previous_layer(layer) if isinstance(layer, nn.Module) else None
    for module in () if previous is None else previous.modules():
        result = follow_hooks(search, module, "forward hook", index)
        if result is not None:
            return result
    return None


def follow_sequential_input(search: Search, index: int) -> Producer | None:
    """Continues the search in the layer before the running one, if an `nn.Sequential` calls
    both. Functions such as `checkpoint_sequential` call the layers by an index, so that their
    frames show only the running layer.
    """
    frame = search.frames[index]
    layer = frame.variables.get("self")
    if not isinstance(layer, nn.Module) or frame.scope is None:
        return None
    inputs: list[Any] = [frame.variables.get(name) for name in list_parameters(frame.scope)[1:2]]
    if not any(is_tensor(value) and value.dtype == search.dtype for value in inputs):
        return None  # the layer itself computed the value
    previous = search.names.previous_sequential_layer(layer)
    if previous is None:
        return None
    path = search.names.module_path(previous)
    outer = next((i for i in range(index, -1, -1) if search.frames[i].is_user_code), index)
    forward = MethodType(type(previous).forward, previous)
    result = follow_hooks(search, previous, "forward hook", index)
    if result is None and floating_weight_dtypes(previous) == {search.dtype}:
        name = ast.Name(path, ast.Load())
        result = search.producer("module", name, outer, path=path, module=previous)
    result = result or follow_returned(search, forward, None, index)
    if result is None:
        return None
    frame_of_forward = make_returned_frame(forward, {})
    values = (
        [] if frame_of_forward is None else list(iterate_returned_values(frame_of_forward.scope))
    )
    if frame_of_forward is None or len(values) != 1 or result.hook:
        return replace(result, passed="", passed_at="", is_proven=True)
    location = frame_of_forward.location_of(values[0])
    if result.kind == "module":
        result = replace(result, location=location)
    return replace(result, passed=source_text(values[0]), passed_at=location, is_proven=True)
