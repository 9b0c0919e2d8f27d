"""Follows the value of a variable to the layers that a running function calls later."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch
from torch import nn

from .expressions import DTYPE_KEEPING_METHODS, read_value
from .frames import CallFrame
from .modules import floating_weight_dtypes


def reaches_layer(frame: CallFrame, name: str, dtype: torch.dtype) -> bool:
    """True if a running function passes the value of a variable, or a sum with it, to a second layer
    with weights of `dtype`, in its running line or in a later one: a cast of the variable in the
    first call only would leave this layer with the old dtype.
    """
    running = frame.statement
    scope = frame.scope
    if running is None or scope is None:
        return False
    names = {name}
    for statement in _iterate_statements(scope, running):
        for call in _list_calls(statement):
            if call is frame.expression or not _has_weights(call, frame, dtype):
                continue
            if any(_keeps_dtype(argument, names) for argument in call.args):
                return True
        _follow_assignment(statement, names)
        if not names:
            return False
    return False


def _iterate_statements(scope: ast.AST, running: ast.stmt) -> Iterator[ast.stmt]:
    """Yields the running statement and the simple statements after it, in the order of the lines."""
    statements = [node for node in ast.walk(scope) if isinstance(node, ast.stmt)]
    later = [node for node in statements if node.lineno > running.lineno]
    simple = (ast.Assign, ast.AugAssign, ast.Expr, ast.Return)
    yield running
    for node in sorted(later, key=lambda node: node.lineno):
        if isinstance(node, simple):
            yield node


def _list_calls(statement: ast.stmt) -> list[ast.Call]:
    return [node for node in ast.walk(statement) if isinstance(node, ast.Call)]


def _has_weights(call: ast.Call, frame: CallFrame, dtype: torch.dtype) -> bool:
    """True if a call is one of a module whose weights all have the dtype."""
    module = read_value(call.func, frame)
    return isinstance(module, nn.Module) and floating_weight_dtypes(module) == {dtype}


def _keeps_dtype(node: ast.AST, names: set[str]) -> bool:
    """True if an expression has the dtype of one of the variables, or is a sum or product with it,
    which has the wider dtype.
    """
    match node:
        case ast.Name(name):
            return name in names
        case ast.BinOp(left, _, right):
            return _keeps_dtype(left, names) or _keeps_dtype(right, names)
        case ast.Subscript(value):
            return _keeps_dtype(value, names)
        case ast.Call(ast.Attribute(value, method)) if method in DTYPE_KEEPING_METHODS:
            return _keeps_dtype(value, names)
    return False


def _follow_assignment(statement: ast.stmt, names: set[str]) -> None:
    """Adds the variable of an assignment to `names` if its value keeps the dtype, and removes it
    otherwise.
    """
    match statement:
        case ast.Assign([ast.Name(target)], value):
            if _keeps_dtype(value, names):
                names.add(target)
            else:
                names.discard(target)
