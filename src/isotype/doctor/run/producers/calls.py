"""Continues the search at a call: in the function or module that it calls, or at its arguments."""

from __future__ import annotations

import ast
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from ....dtypes import format_dtype
from ..arguments import list_arguments
from ..arrays import find_float64_origin
from ..casts import has_unread_dtype, read_cast_dtype
from ..expressions import (
    CASTING_METHODS,
    CREATION_FUNCTIONS,
    DTYPE_KEEPING_METHODS,
    PROMOTING_METHODS,
    UNKNOWN,
    TensorFacts,
    creates_integers,
    is_of_torch,
    is_tensor,
    node_keyword,
    read_function,
    read_value,
)
from ..frames import source_text
from ..producer import Producer
from .autocast import follow_autocast, is_fp32_operation
from .functions import follow_item, follow_passed_function, follow_returned
from .items import follow_next_item
from .modules import follow_module
from .promotions import follow_widest
from .search import Search
from .stored import follow_stored_tensor

# functions that keep the dtype of a NumPy array
_ARRAY_FUNCTIONS = frozenset(("from_numpy", "as_tensor", "tensor"))


def follow_call(search: Search, node: ast.Call, index: int, line: int) -> Producer:
    frame = search.frame_at(index, line)
    if isinstance(node.func, ast.Name) and node.func.id == "next" and node.args:
        result = follow_next_item(search, node, index, line)
        return result or search.producer("data", node, index)
    function = read_function(node.func, frame)
    if isinstance(function, nn.Module):
        return follow_module(search, function, node, index, line)
    field = find_field(node, function, search.key)
    if field is not None and isinstance(function, type):  # an object, such as an output
        search.key = UNKNOWN
        return follow_item(search, field, index, field.lineno)
    if isinstance(node.func, ast.Attribute):
        result = follow_method(search, node, node.func, index, line)
        if result is not None:
            return result
    is_torch_function = is_of_torch(function) or isinstance(function, type(torch.add))
    if is_torch_function and node.args:
        return follow_torch_function(search, node, index, line)
    return (
        follow_returned(search, function, node, index, line)
        or follow_passed_function(search, node, index, line)
        or follow_stored_tensor(search, node, index, line)
        or follow_first_argument(search, node, index, line)
        or follow_autocast(search, node, index, line)
        or follow_wide_argument(search, node, index, line)
        or search.producer("call", node, index)
    )


def follow_torch_function(search: Search, node: ast.Call, index: int, line: int) -> Producer:
    """Continues the search at the operands of a function of torch. An argument that is the wanted
    dtype makes the function a cast.
    """
    frame = search.frame_at(index, line)
    if any(read_value(part, frame) is search.dtype for part in list_arguments(node)):
        return search.producer("cast", node, index, is_proven=True)
    operands = list(node.args)
    if isinstance(operands[0], (ast.List, ast.Tuple)):
        operands = list(operands[0].elts)
    return follow_widest(search, operands, node, index, line)


def follow_first_argument(search: Search, node: ast.Call, index: int, line: int) -> Producer | None:
    """Continues the search at the first argument of a helper that a library calls, if the
    argument has the dtype.
    """
    frame = search.frame_at(index, line)
    arguments = list_arguments(node)
    if not arguments or frame.is_user_code:
        return None
    value = read_value(arguments[0], frame)
    if is_tensor(value) and value.dtype == search.dtype:
        return search.follow(arguments[0], index, line)
    result = search.follow(arguments[0], index, line) if value is UNKNOWN else None
    return result if result is not None and result.is_proven else None


def follow_wide_argument(search: Search, node: ast.Call, index: int, line: int) -> Producer | None:
    """Continues the search at the arguments of a library's function, if the widest of its
    tensors has the wanted dtype: `scheduler.add_noise(latents, noise, step)` promotes.
    """
    frame = search.frame_at(index, line)
    values = [(argument, read_value(argument, frame)) for argument in list_arguments(node)]
    tensors = [(argument, value.dtype) for argument, value in values if is_tensor(value)]
    dtypes = {dtype for _, dtype in tensors if dtype.is_floating_point}
    if max(dtypes, key=lambda dtype: dtype.itemsize, default=None) != search.dtype:
        return None
    argument = next(argument for argument, dtype in tensors if dtype == search.dtype)
    result = search.follow(argument, index, line)
    return result if result.is_proven else None


def follow_method(
    search: Search, node: ast.Call, method: ast.Attribute, index: int, line: int
) -> Producer | None:
    """Continues the search at a method of a tensor or of a batch. Returns None if the method is
    another one.
    """
    frame = search.frame_at(index, line)
    owner = read_value(method.value, frame)
    source = None if frame.is_user_code else find_dtype_source(node)
    source_value = read_value(source, frame)
    if source is not None and is_tensor(source_value) and source_value.dtype == search.dtype:
        return search.follow(source, index, line)  # a library casts to the dtype of an argument
    result = read_value(node, frame)
    if is_tensor(owner) and isinstance(result, TensorFacts):
        if owner.dtype == result.dtype:
            return search.follow(method.value, index, line)
        is_proven = result.dtype == search.dtype
        if method.attr not in CASTING_METHODS and method.attr != "type_as":
            reason = f"it computes floats from {format_dtype(owner.dtype)}"
            computed = search.producer("call", node, index, is_proven=is_proven)
            return replace(computed, reason=reason)
        return search.producer("cast", node, index, is_proven=is_proven)
    if method.attr in ("float", "half", "bfloat16", "double", "to", "type"):
        dtype = read_cast_dtype(node, frame)
        if dtype is None and not has_unread_dtype(node, frame):  # changes only the device
            return search.follow(method.value, index, line)
        return search.producer("cast", node, index, is_proven=dtype == search.dtype)
    if owner is UNKNOWN or is_tensor(owner):
        return follow_tensor_method(search, node, method, index, line)
    if owner is torch and method.attr in CREATION_FUNCTIONS:
        is_proven = is_tensor(result) and result.dtype == search.dtype
        if is_proven:
            return search.producer("creation", node, index, is_proven=True)
        return follow_unread_creation(search, node, index, line)
    return None


def follow_unread_creation(search: Search, node: ast.Call, index: int, line: int) -> Producer:
    """Continues the search at a call such as `torch.tensor(rows)`, whose dtype cannot be read."""
    text = source_text(node)
    if text.startswith("torch.as_tensor(") and len(node.args) == 1:
        kept = search.follow(node.args[0], index, line)  # a tensor stays as it is
        if kept.is_proven:
            return kept
    if search.dtype.is_floating_point and creates_integers(node):
        return search.producer("unknown", node, index)
    return follow_array(search, node, index, line)


def follow_tensor_method(
    search: Search, node: ast.Call, method: ast.Attribute, index: int, line: int
) -> Producer | None:
    """Continues the search at the tensor of a method such as `cumsum`, or at one of the
    operands of a method such as `mul`. An argument `dtype=` makes the method a cast.
    """
    if is_fp32_operation(search, node, index, line):
        computed = follow_autocast(search, node, index, line)
        if computed is not None:
            return computed
    promotes = method.attr in PROMOTING_METHODS
    if not promotes and method.attr not in DTYPE_KEEPING_METHODS:
        return None
    frame = search.frame_at(index, line)
    if read_value(node_keyword(node, "dtype"), frame) is search.dtype:
        return search.producer("cast", node, index, is_proven=True)
    if promotes:
        return follow_widest(search, [method.value, *node.args], node, index, line)
    value = read_value(method.value, frame)
    may_have_dtype = value is UNKNOWN or (is_tensor(value) and value.dtype == search.dtype)
    return search.follow(method.value, index, line) if may_have_dtype else None


def follow_array(search: Search, node: ast.Call, index: int, line: int) -> Producer:
    """Returns the call that makes a tensor of a NumPy array. It gives the tensor fp64, if the
    source code shows that NumPy computed the array in fp64.
    """
    result = search.producer("creation", node, index)
    keeps_array = source_text(node.func).rpartition(".")[2] in _ARRAY_FUNCTIONS and node.args
    if search.dtype != torch.float64 or not keeps_array or node_keyword(node, "dtype"):
        return result
    frame = replace(search.frame_at(index, line), line=line)
    origin = find_float64_origin(node.args[0], frame)
    if origin is None:
        return result
    reason = f"NumPy computes `{origin.text}` ({origin.location}) in fp64"
    return replace(result, reason=reason, is_proven=True)


def find_field(call: ast.Call, function: Any, key: Any) -> ast.expr | None:
    """Returns the value that a call gives to a field of a new object, by keyword, or by position for
    a dataclass or a named tuple.
    """
    if not isinstance(key, str):
        return None
    names = list(getattr(function, "_fields", ()))
    if isinstance(function, type) and is_dataclass(function):
        names = [field.name for field in fields(function) if field.init]
    if key in names[: len(call.args)]:
        return call.args[names.index(key)]
    return node_keyword(call, key)


def find_dtype_source(call: ast.Call) -> ast.expr | None:
    """Returns the tensor `y` of the casts `x.to(y.dtype)` and `x.type_as(y)`."""
    for argument in list_arguments(call):
        match argument:
            case ast.Attribute(owner, "dtype"):
                return owner
    is_same_type = isinstance(call.func, ast.Attribute) and call.func.attr == "type_as"
    return call.args[0] if is_same_type and call.args else None
