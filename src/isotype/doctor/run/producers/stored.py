"""Continues the search at the line that stored a tensor in an object or a dict, such as a cache of
keys and values.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ....dtypes import format_dtype
from ..arguments import list_parameters
from ..expressions import UNKNOWN, read_value
from ..frames import source_text
from ..producer import Producer
from .search import Search

_MAX_DEPTH = 3  # objects inside of objects in which a stored tensor is searched


def follow_stored_tensor(search: Search, node: ast.Call, index: int, line: int) -> Producer | None:
    """Continues the search at the line of the user's code that wrote a tensor into an object
    of a library whose method returned the tensor, such as a cache of keys and values.
    """
    if not isinstance(node.func, ast.Attribute):
        return None
    owner = read_value(node.func.value, search.frame_at(index, line))
    stored = [] if owner is UNKNOWN else list(iterate_stored_tensors(owner))
    names = [name for name, tensor in stored if tensor is search.tensor]
    if not names:  # the method returned another tensor that it computed from one of these
        names = [name for name, _ in stored]
    for name in dict.fromkeys(names):
        result = follow_writes(search, name, owner)
        if result is not None:
            return result
    return follow_method_calls(search, node.func.attr, owner) if stored else None


def follow_method_calls(search: Search, name: str, owner: object) -> Producer | None:
    """Continues the search at the argument that the user's code passes to a method of a
    library's object, if the same method returns it later, as `update` of a cache does.
    """
    element = search.element or 0
    results = []
    for source, call in search.program.list_calls(name):
        if not isinstance(call.func, ast.Attribute) or len(call.args) <= element:
            continue
        index = search.add_function_frame(call, source)
        if index is None or is_other_object(search, call.func.value, index, owner):
            continue
        search.key = search.element = None
        result = search.follow(call.args[element], index, call.lineno)
        if result.is_proven:
            place = search.frames[index].location_of(call)
            result = replace(result, reason=f"`{source_text(call)}` ({place}) stores it")
            stored = source_text(call.args[element])
            results.append(replace(result, stored=stored, stored_at=place))
    return results[0] if len({result.location for result in results}) == 1 else None


def is_other_object(search: Search, node: ast.expr, index: int, owner: object) -> bool:
    """True if an expression is an object of another class."""
    value = read_value(node, search.frames[index])
    return value is not UNKNOWN and type(value) is not type(owner)


def follow_writes(search: Search, name: str, owner: object) -> Producer | None:
    """Continues the search at the only assignment `OBJECT.NAME = ...` of the user's files that
    gives the attribute the wanted dtype, or a half dtype which the model's dtype widens to it.
    The assignment may be in a function that has returned.
    """
    usual = search.names.majority_dtype()
    dtypes = [search.dtype]
    if search.dtype == torch.float32 and usual in (torch.bfloat16, torch.float16):
        dtypes += [half for half in (torch.bfloat16, torch.float16) if half != usual]
    wanted = search.dtype
    for dtype in dtypes:
        results = []
        for target, value, index in list(iterate_writes(search, name, owner)):
            search.dtype, search.key = dtype, UNKNOWN
            result = search.follow(value, index, value.lineno)
            search.dtype = wanted
            if not result.is_proven:
                continue
            place = search.frames[index].location_of(value)
            reason = f"`{source_text(target)} = {source_text(value)}` ({place}) stores it"
            if dtype != wanted and usual is not None:
                narrow, wide = format_dtype(dtype), format_dtype(wanted)
                reason += f" in {narrow}, and {narrow} with {format_dtype(usual)} gives {wide}"
            results.append(replace(result, reason=reason))
        if len({result.location for result in results}) == 1:
            return results[0]
    return None


def iterate_writes(
    search: Search, name: str, owner: object
) -> Iterator[tuple[ast.expr, ast.expr, int]]:
    """Yields the target and the value of each assignment `OBJECT.NAME = ...` in the user's
    files, and the index of a frame for the function that contains it.
    """
    for source, node in search.program.list_assignments():
        target = node.targets[0]
        while isinstance(target, ast.Subscript):
            target = target.value
        if not isinstance(target, ast.Attribute) or target.attr != name:
            continue
        index = search.add_function_frame(node, source)
        holder = UNKNOWN if index is None else read_value(target.value, search.frames[index])
        is_own_class = source_text(target.value) == "self" and holder is not owner
        if index is not None and not is_own_class:
            yield target, node.value, index


def follow_item_writes(
    search: Search, key: str, container: dict[Any, Any], node: ast.AST, index: int
) -> Producer | None:
    """Continues the search at the assignment `PARAMETER[key] = ...` of a function that has
    returned, as a module has that stores its result in the dict that it gets. If the
    assignments prove nothing, the origin is not known: the line that made the dict did not make
    this value. Returns None if there is no such assignment.
    """
    is_written = False
    results = []
    for source, binding in search.program.list_assignments():
        match binding:
            case ast.Assign([ast.Subscript(ast.Name(name), ast.Constant(value))]) if value == key:
                pass
            case _:
                continue
        new_index = search.add_function_frame(binding, source)
        if new_index is None or new_index < search.running_count:
            continue
        frame = search.frames[new_index]
        if isinstance(frame.scope, ast.Module) or name not in list_parameters(frame.scope):
            continue
        is_written = True
        variables = {**frame.variables, name: container}
        search.frames[new_index] = replace(frame, variables=variables)
        search.key = UNKNOWN
        result = search.follow(binding.value, new_index, binding.lineno)
        if result.is_proven:
            results.append(result)
    if len({result.location for result in results}) == 1:
        return results[0]
    return search.producer("unknown", node, index) if is_written else None


def iterate_stored_tensors(owner: object, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that an object, or an object in its attributes, holds in attributes, and
    the names of these.
    """
    if isinstance(owner, (nn.Module, torch.Tensor, type)) or depth > _MAX_DEPTH:
        return
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, torch.Tensor):
                yield name, item
            else:
                yield from iterate_stored_tensors(item, depth + 1)
