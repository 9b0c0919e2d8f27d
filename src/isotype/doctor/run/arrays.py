"""Determines from the source code that a NumPy array is fp64. NumPy computes in fp64 where the code
gives no dtype, and `torch.from_numpy` and `torch.tensor` keep it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from .expressions import node_keyword, read_function, read_value
from .frames import CallFrame, make_returned_frame, source_text

# functions of NumPy whose result is fp64 for arguments of any dtype, unless the call has a `dtype`
_FLOAT64_FUNCTIONS = frozenset(
    ("linspace", "logspace", "geomspace", "interp", "zeros", "ones", "empty", "eye", "identity")
    + ("rand", "randn", "random", "normal", "uniform", "standard_normal", "float64", "double")
    + ("hanning", "hamming", "blackman", "kaiser", "bartlett")
)
# methods of an array whose result has the array's dtype
_DTYPE_KEEPING_METHODS = frozenset(
    ("copy", "reshape", "ravel", "flatten", "transpose", "squeeze", "swapaxes", "repeat", "take")
    + ("clip", "round", "cumsum", "cumprod", "sum", "mean", "min", "max", "std", "var", "dot")
)
_MAX_DEPTH = 20  # expressions that one search follows


@dataclass(frozen=True, slots=True)
class ArrayOrigin:
    """The expression that made an array fp64.

    text      the source code of the expression
    location  the file and line of the expression
    """

    text: str
    location: str


def find_float64_origin(node: ast.AST, frame: CallFrame, depth: int = 0) -> ArrayOrigin | None:
    """Returns the expression that made the array `node` fp64. Returns None if the source code does
    not prove this dtype. `frame` is the frame of the expression, at the line that evaluates it.
    """
    if depth > _MAX_DEPTH:
        return None
    match node:
        case ast.Name(name):
            value = find_assigned_array(name, frame)
            if value is None:
                return None
            return find_float64_origin(value, replace(frame, line=value.lineno), depth + 1)
        case ast.Attribute(ast.Name("self"), name):
            stored = _find_stored_value(name, frame)
            return None if stored is None else find_float64_origin(*stored, depth + 1)
        case ast.Subscript(operand) | ast.UnaryOp(_, operand) | ast.Attribute(operand, "T"):
            return find_float64_origin(operand, frame, depth + 1)
        case ast.BinOp(left, _, right):
            return _find_in([left, right], frame, depth)
        case ast.List(elements) | ast.Tuple(elements):
            return _find_in(elements, frame, depth)
        case ast.Call():
            return _find_in_call(node, frame, depth)
    return None


def _find_stored_value(name: str, frame: CallFrame) -> tuple[ast.expr, CallFrame] | None:
    """Returns the only value that the methods of a class assign to `self.NAME`, and the frame of its
    method. `frame` is the frame of a method of this class.
    """
    owner = frame.global_variables.get(frame.code.co_qualname.rpartition(".")[0])
    values: list[tuple[ast.expr, CallFrame]] = []
    for function in vars(owner).values() if isinstance(owner, type) else ():
        method = make_returned_frame(function, {})
        if method is None or method.scope is None:
            continue
        for node in ast.walk(method.scope):
            match node:
                case ast.Assign([ast.Attribute(ast.Name("self"), target)], value):
                    if target == name:
                        values.append((value, replace(method, line=value.lineno)))
    return values[0] if len(values) == 1 else None


def _find_in_call(node: ast.Call, frame: CallFrame, depth: int) -> ArrayOrigin | None:
    name = ast.unparse(node.func).rpartition(".")[2]
    if node_keyword(node, "dtype") is not None or name == "astype":
        return None
    owner = read_value(node.func.value, frame) if isinstance(node.func, ast.Attribute) else None
    if isinstance(owner, ModuleType) and owner.__name__.partition(".")[0] == "numpy":
        if name in _FLOAT64_FUNCTIONS or (name == "array" and _has_floats(node.args[:1])):
            text = source_text(node)
            return ArrayOrigin(text, frame.location_of(node))
        return _find_in(node.args, frame, depth)
    if isinstance(node.func, ast.Attribute) and name in _DTYPE_KEEPING_METHODS:
        return find_float64_origin(node.func.value, frame, depth + 1)
    returned = make_returned_frame(read_function(node.func, frame), {})
    scope = None if returned is None else returned.scope
    if returned is None or scope is None:
        return None
    values = [part.value for part in ast.walk(scope) if isinstance(part, ast.Return) and part.value]
    origins = [
        find_float64_origin(value, replace(returned, line=value.lineno), depth + 1)
        for value in values
    ]
    return origins[0] if origins and None not in origins else None


def _find_in(nodes: list[ast.expr], frame: CallFrame, depth: int) -> ArrayOrigin | None:
    """Returns the first origin among operands: NumPy's result is fp64 if one of them is fp64."""
    origins = (find_float64_origin(node, frame, depth + 1) for node in nodes)
    return next((origin for origin in origins if origin is not None), None)


def _has_floats(arguments: list[ast.expr]) -> bool:
    """True if the first argument is a list with a float constant in it."""
    return any(
        isinstance(part, ast.Constant) and isinstance(part.value, float)
        for argument in arguments
        if isinstance(argument, (ast.List, ast.Tuple))
        for part in _iterate_elements(argument)
    )


def _iterate_elements(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, (ast.List, ast.Tuple)):
        for element in node.elts:
            yield from _iterate_elements(element)
    elif isinstance(node, ast.UnaryOp):
        yield from _iterate_elements(node.operand)
    else:
        yield node


def find_assigned_array(name: str, frame: CallFrame) -> ast.expr | None:
    """Returns the value of the last assignment `NAME = value` before a line. Returns None if other
    statements assign the name too, as a loop does.
    """
    scope: Any = frame.scope
    last = None
    for node in () if scope is None else ast.walk(scope):
        if isinstance(node, ast.Assign) and (node.end_lineno or node.lineno) < frame.line:
            is_assigned = isinstance(node.targets[0], ast.Name) and node.targets[0].id == name
            if is_assigned and (last is None or last.lineno < node.lineno):
                last = node
        elif isinstance(node, (ast.For, ast.AugAssign, ast.NamedExpr)):
            targets = [part for part in ast.walk(node.target) if isinstance(part, ast.Name)]
            if any(part.id == name for part in targets):
                return None
    return None if last is None else last.value
