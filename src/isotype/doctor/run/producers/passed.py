"""Continues the search at the argument that the caller of a function passed for a parameter."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..arguments import (
    find_argument,
    find_starred_argument,
    is_first_argument,
    iterate_arguments,
    read_starred_argument,
)
from ..expressions import UNKNOWN, read_value
from ..frames import CallFrame
from ..producer import Producer
from .modules import follow_hooks
from .search import Search


def follow_argument(
    search: Search, scope: ast.AST, name: str, node: ast.AST, index: int
) -> Producer:
    """If the search has reached a parameter of a function, continues it at the argument that
    the caller passed for this parameter.
    """
    outer, call, call_line = search.find_caller(index)
    if outer < 0 or call is None:
        return search.producer("unknown", node, index)
    frame = search.frames[index]
    is_bound = not is_first_argument(frame.variables.get("self"), call, search.frames[outer])
    argument = find_argument(scope, call, name, is_bound)
    value = frame.variables.get(name)
    module = frame.variables.get("self")
    passed_value = read_value(argument, search.frame_at(outer, call_line))
    is_forward = isinstance(module, nn.Module) and frame.function != "__init__"
    if isinstance(module, nn.Module) and is_forward and passed_value is not value:
        result = follow_hooks(search, module, "forward pre-hook", index)
        if result is not None:
            return result
    star = find_starred_argument(scope, call, name, is_bound)
    if argument is None and star is not None:
        search.key = star[1]
        return search.follow(star[0], outer, call_line)
    if argument is None or isinstance(argument, ast.Starred):
        passed = read_starred_argument(scope, call, name, is_bound, search.frames[outer])
        value = value if passed is UNKNOWN else passed
        return follow_starred(search, argument, name, value, node, index, outer)
    return search.follow(argument, outer, call_line)


def follow_starred(
    search: Search,
    argument: ast.Starred | None,
    name: str,
    value: Any,
    node: ast.AST,
    index: int,
    outer: int,
) -> Producer:
    """Continues the search if the caller passed the argument with `*` or `**`. The search goes
    outward through the frames of libraries to the first call that passes this tensor by an
    expression.
    """
    if index in search.callers or not isinstance(value, torch.Tensor):
        return search.producer("unknown", node, index)
    search.key = name
    for number in range(outer, -1, -1):
        frame = search.frames[number]
        call = frame.expression
        if frame.is_forwarding or call is None:
            continue
        if isinstance(call, (ast.BinOp, ast.UnaryOp)):  # as in `1 - mask`
            operands = ast.iter_child_nodes(call)
            operand = next((node for node in operands if read_value(node, frame) is value), None)
            if operand is not None:
                return search.follow(operand, number)
        if not isinstance(call, ast.Call):
            continue
        for part in iterate_arguments(call):
            if not isinstance(part, ast.Starred) and read_value(part, frame) is value:
                return search.follow(part, number)
        if frame.is_user_code and not passes_own_arguments(frame, call, value):
            return follow_user_argument(search, call, name, value, node, index, number)
    return search.producer("unknown", node, index)


def passes_own_arguments(frame: CallFrame, call: ast.Call, value: torch.Tensor) -> bool:
    """True if a tensor is in the `*args` or `**kwargs` of a function, and the function passes these
    on with `*` or `**`, as a decorator does.
    """
    scope = frame.scope
    if scope is None or isinstance(scope, ast.Module):
        return False
    variadic = [argument.arg for argument in (scope.args.vararg, scope.args.kwarg) if argument]
    for part in iterate_arguments(call):
        match part:
            case ast.Starred(ast.Name(name)) if name in variadic:
                if contains_tensor(frame.variables.get(name), value):
                    return True
    return False


def follow_user_argument(
    search: Search,
    call: ast.Call,
    name: str,
    value: torch.Tensor,
    node: ast.AST,
    index: int,
    outer: int,
) -> Producer:
    """Continues the search at an argument of the user's call that contains the tensor, or that
    cannot be read.
    """
    frame = search.frames[outer]
    for part in iterate_arguments(call):
        container = part.value if isinstance(part, ast.Starred) else part
        items = read_value(container, frame)
        if items is not UNKNOWN and not contains_tensor(items, value):
            continue
        search.key = name
        is_starred = isinstance(part, ast.Starred)
        result = search.follow(container, outer)
        if not result.is_proven and (items is not UNKNOWN or is_starred):
            result = search.producer("data", container, outer)
        if is_starred:  # the user's line has no expression for the tensor alone
            result = replace(result, passed="", passed_at="")
        if result.is_proven or result.kind == "data":
            return result
    return search.producer("unknown", node, index)


def contains_tensor(container: Any, tensor: torch.Tensor) -> bool:
    data = getattr(container, "data", container)  # BatchEncoding of transformers
    if isinstance(data, dict):
        return any(item is tensor for item in data.values())
    return isinstance(data, (list, tuple)) and any(item is tensor for item in data)
