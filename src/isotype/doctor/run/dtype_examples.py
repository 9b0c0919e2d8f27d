"""Finds the tensor whose dtype a running call reads, such as `x` in `mask.to(x.dtype)`, while the
variables of the functions still exist.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch

from .arguments import find_passed_argument
from .expressions import node_keyword
from .frames import CallFrame, make_called_frame
from .running_code import RunningCode

_MAX_CALLERS = 3  # functions through which a dtype argument is followed outward


def find_example(calls: Sequence[RunningCode], frame: FrameType | None) -> torch.Tensor | None:
    """Returns the tensor whose dtype a cast or a new tensor takes, or None. If the dtype is a
    parameter of the function, the search continues in its callers.

    calls  the running frames that do not belong to PyTorch, the innermost first
    frame  a running frame at or inside the innermost of them
    """
    argument = None if not calls else _read_dtype_argument(calls[0].code, calls[0].instruction)
    if argument is None:
        return None
    callers = [*calls[1 : 1 + _MAX_CALLERS], None]
    for call, caller in zip(calls, callers):
        while frame is not None and frame.f_code is not call.code:
            frame = frame.f_back
        if frame is None:
            return None
        variables = _read_variables(frame)
        if not isinstance(argument, ast.Name):
            return _read_tensor(argument, variables)
        value = variables.get(argument.id)
        if isinstance(value, torch.Tensor):
            return value  # as in `x.to(other)`
        if caller is None or not isinstance(value, torch.dtype):
            return None
        inner = dataclasses.replace(
            make_called_frame(call.code, call.instruction), variables=variables
        )
        outer = make_called_frame(caller.code, caller.instruction)
        passed = find_passed_argument(inner, outer, argument.id)
        if passed is None:
            return None
        argument = resolve_variable(passed, outer)
    return None


def _read_variables(frame: FrameType) -> dict[str, Any]:
    """Returns the local variables of a frame. Before Python 3.13, a function's frame keeps a copy of
    its variables after they were read. The tensors are removed from this copy, because otherwise
    `del logits` in the program would not free their memory.
    """
    kept = frame.f_locals
    variables = dict(kept)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        for name, value in variables.items():
            if isinstance(value, torch.Tensor):
                del kept[name]
    return variables


def _read_tensor(argument: ast.AST, variables: Mapping[str, Any]) -> torch.Tensor | None:
    """Returns the tensor `x` of `x.dtype`."""
    names: list[str] = []
    match argument:
        case ast.Attribute(node, "dtype"):
            while isinstance(node, ast.Attribute):
                names.insert(0, node.attr)
                node = node.value
        case _:
            return None
    value = variables.get(node.id) if isinstance(node, ast.Name) else None
    for name in names:
        value = _read_member(value, name)
    return value if isinstance(value, torch.Tensor) else None


def _read_member(owner: Any, name: str) -> Any:
    """Returns an attribute, a parameter or a buffer of an object, without calling a property."""
    members = getattr(owner, "__dict__", {})
    for table in (members, members.get("_parameters"), members.get("_buffers")):
        if isinstance(table, dict) and name in table:
            return table[name]
    return None


@functools.cache
def _read_dtype_argument(code: CodeType, instruction: int) -> ast.expr | None:
    """Returns the expression from which a call takes its dtype: `x.dtype` in `mask.to(x.dtype)`, and
    also in `mask.type_as(x)`. Returns None if there is none.
    """
    frame = make_called_frame(code, instruction)
    call = frame.expression
    if not isinstance(call, ast.Call):
        return None
    argument = node_keyword(call, "dtype") or (call.args[0] if call.args else None)
    if argument is None:
        return None
    if ast.unparse(call.func).endswith(".type_as"):
        return ast.Attribute(argument, "dtype", ast.Load())
    return resolve_variable(argument, frame)


def resolve_variable(node: ast.expr, frame: CallFrame) -> ast.expr:
    """Returns the expression that a function assigned last to a variable, or to an attribute such as
    `self.dtype`, before the running line. Returns other expressions, and what no line assigns, as
    they are.
    """
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return node
    name = ast.unparse(node)
    values: list[tuple[int, ast.expr]] = []
    for statement in () if frame.scope is None else ast.walk(frame.scope):
        match statement:
            case ast.Assign([target], value) if statement.lineno < frame.line:
                pairs = [(target, value)]
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs = list(zip(target.elts, value.elts))
                values += [
                    (statement.lineno, part)
                    for variable, part in pairs
                    if isinstance(variable, type(node)) and ast.unparse(variable) == name
                ]
    return max(values, key=lambda item: item[0])[1] if values else node
