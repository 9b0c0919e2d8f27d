"""Finds casts in the source code, and reads the dtypes to which they cast."""

from __future__ import annotations

import ast
from typing import Any

import torch

from .expressions import CAST_METHODS, UNKNOWN, is_tensor, read_value
from .frames import CallFrame

_CONVERTING_METHODS = ("to", "type", "type_as", "astype")


def read_cast_dtype(call: ast.Call, frame: CallFrame) -> torch.dtype | None:
    """Returns the dtype to which a call casts its tensor, its module or its batch. Returns None if
    the call is no cast, or if its dtype cannot be read.
    """
    if not isinstance(call.func, ast.Attribute):
        return None
    name = call.func.attr
    if name in CAST_METHODS and not call.args:
        return CAST_METHODS[name]
    if name not in _CONVERTING_METHODS:
        return None
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    for argument in arguments:
        dtype = _as_dtype(read_value(argument, frame))
        if dtype is not None:
            return dtype
    return None


def has_unread_dtype(call: ast.Call, frame: CallFrame) -> bool:
    """True if an argument of `to` is a variable whose name contains `dtype`, and whose value cannot
    be read.
    """
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "to":
        return False
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    return any(
        "dtype" in ast.unparse(argument) and read_value(argument, frame) is UNKNOWN
        for argument in arguments
    )


def find_cast(scope: ast.AST | None, frame: CallFrame, dtype: torch.dtype) -> ast.Call | None:
    """Returns the last call in a piece of code that casts to `dtype`."""
    if scope is None:
        return None
    casts = [
        node
        for node in ast.walk(scope)
        if isinstance(node, ast.Call) and read_cast_dtype(node, frame) == dtype
    ]
    return max(casts, key=lambda node: node.lineno, default=None)


def _as_dtype(value: Any) -> torch.dtype | None:
    if isinstance(value, torch.dtype):
        return value
    if value is not UNKNOWN and is_tensor(value):
        return value.dtype  # type: ignore[no-any-return]
    return None
