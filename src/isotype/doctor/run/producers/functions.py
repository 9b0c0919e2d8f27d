"""Continues the search in the values that a function of the user's code returned."""

from __future__ import annotations

import ast
from dataclasses import replace
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from ..arguments import read_defaults
from ..bindings import iterate_result_code
from ..casts import find_cast
from ..expressions import is_tensor, read_function, read_value
from ..frames import make_returned_frame
from ..producer import Producer
from .search import Search


def follow_returned(
    search: Search,
    function: Any,
    call: ast.Call | None,
    index: int,
    line: int | None = None,
    *,
    is_item: bool = False,
) -> Producer | None:
    """Searches the values that a function of the user's code returned. Returns None unless the
    source code proves that a value has the dtype.

    is_item  whether the function is a collator or a method of a dataset. The expression that it
             returns under the wanted key then gave the tensor its dtype.
    """
    if line is None:
        line = search.frames[index].line
    variables = read_arguments(search, function, call, index, line)
    frame = make_returned_frame(resolve_function(function), variables)
    if frame is None or any(frame.code is other.code for other in search.frames):
        return None
    new_index = len(search.frames)
    search.frames.append(frame)
    search.callers[new_index] = (index, call, line)
    if is_item:
        search.item_frames.add(new_index)
    element = search.element
    search.element = None
    values = search.list_returned_values(new_index)
    for value in values:
        if isinstance(value, ast.Tuple) and element is not None and element < len(value.elts):
            result = follow_item(search, value.elts[element], new_index, value.lineno)
        else:
            result = search.follow(value, new_index, value.lineno)
        if result.is_proven:
            return result
    for code in iterate_result_code(frame.scope, values) if call is None else ():
        cast = find_cast(code, frame, search.dtype)
        if cast is not None:
            return search.producer("cast", cast, new_index, is_proven=True)
    return None


def follow_item(search: Search, node: ast.expr, index: int, line: int) -> Producer:
    """Continues the search at an element of a tuple or dict that a function returns. In a
    collator or dataset, an expression of an unknown dtype gave the tensor its dtype.
    """
    result = search.follow(node, index, line)
    value = read_value(node, search.frame_at(index, line))
    is_creation = result.kind == "creation" and not is_tensor(value)
    if is_creation or (index in search.item_frames and not is_tensor(value)):
        if result.kind == "unknown":
            result = search.producer("data", node, index)
        return replace(result, is_proven=True)
    return result


def read_arguments(
    search: Search, function: Any, call: ast.Call | None, index: int, line: int
) -> dict[str, Any]:
    """Returns the values of the arguments that a call passed, as far as they can be read."""
    function = resolve_function(function)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if call is None or code is None:
        return {}
    names = list(code.co_varnames[: code.co_argcount])
    if isinstance(function, MethodType):
        names = names[1:]
    frame = search.frame_at(index, line)
    values = read_defaults(function)
    for name, argument in zip(names, call.args):
        if isinstance(argument, ast.Starred):
            break
        values[name] = read_value(argument, frame)
    for keyword in call.keywords:
        if keyword.arg is not None:
            values[keyword.arg] = read_value(keyword.value, frame)
    return values


def follow_passed_function(
    search: Search, node: ast.Call, index: int, line: int
) -> Producer | None:
    """Searches a function that the call passes to a function of a library, such as the lambda
    in `tree_map(lambda tensor: tensor.half(), batch)`.
    """
    frame = search.frame_at(index, line)
    for argument in node.args:
        if isinstance(argument, ast.Lambda):
            cast = find_cast(argument.body, frame, search.dtype)
            if cast is not None:
                return search.producer("cast", cast, index, is_proven=True)
        elif isinstance(argument, (ast.Name, ast.Attribute)):
            function = read_function(argument, frame)
            if isinstance(function, (FunctionType, MethodType)):
                result = follow_returned(search, function, None, index)
                if result is not None:
                    return result
    return None


def resolve_function(value: Any) -> Any:
    """Returns the method `__call__` of an object of a class in the user's code, and other values
    unchanged.
    """
    if isinstance(value, (FunctionType, MethodType, type, nn.Module)):
        return value
    method = vars(type(value)).get("__call__")
    return MethodType(method, value) if isinstance(method, FunctionType) else value
