"""Compares forward and backward of an autograd.Function in the source code: a cast that forward
applies to a tensor, and that backward does not apply to the same saved tensor.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .bindings import find_assigned_expression, find_earlier_bindings, find_position
from .casts import read_cast_dtype
from .expressions import CASTING_METHODS, read_value
from .frames import CallFrame, make_returned_frame, source_text

_MAX_STEPS = 8  # assignments between a saved tensor and the failing expression
_SAVED_TENSORS = ("saved_tensors", "saved_variables")


@dataclass(frozen=True, slots=True)
class MissingCast:
    """A cast in forward that backward does not do.

    text      the cast in forward
    location  the file and line of the cast
    value     the expression in backward that uses the saved tensor without the cast
    value_at  the file and line of this expression
    cast      the expression in backward with the cast
    """

    text: str
    location: str
    value: str
    value_at: str
    cast: str


def find_missing_cast(
    frame: CallFrame, context: Any, node: ast.AST, wanted: torch.dtype
) -> MissingCast | None:
    """Returns the cast to the dtype `wanted` that forward applies to a saved tensor, if the
    expression `node` in backward uses this tensor without it.

    frame    the frame of backward
    context  the context of the autograd.Function
    """
    function = getattr(type(context), "_forward_cls", None)
    forward = None if function is None else make_returned_frame(function.forward, {})
    if forward is None or forward.scope is None or not isinstance(node, ast.expr):
        return None
    value, key = _follow_to_saved_tensor(node, frame, context, wanted)
    pairs = set(_iterate_saved(forward.scope))
    saved = dict(pairs)
    if len(saved) < len(pairs):
        return None  # several branches save different variables
    if value is None or key not in saved:
        return None
    renamed = _name_in_backward(saved, frame)
    for cast in _iterate_casts(forward.scope, saved[key]):
        text = _cast_like(cast, value, renamed, frame, wanted)
        if text:
            return MissingCast(
                source_text(cast),
                forward.location_of(cast),
                source_text(value),
                frame.location_of(value),
                text,
            )
    return None


def _follow_to_saved_tensor(
    node: ast.expr, frame: CallFrame, context: Any, wanted: torch.dtype
) -> tuple[ast.expr | None, int | str]:
    """Returns the expression that reads a saved tensor, and the position or the attribute with which
    the context holds it. Assignments that cast to `wanted` did not run.
    """
    for _ in range(_MAX_STEPS):
        key = _read_context_attribute(node, frame, context)
        if key:
            return node, key
        name = _root_name(node)
        bindings = [
            binding
            for binding in find_earlier_bindings(frame.scope or ast.Pass(), name, frame.line)
            if not isinstance(binding, ast.Assign) or not _casts(binding.value, frame, wanted)
        ]
        binding = bindings[0] if bindings else None
        if not name or not isinstance(binding, ast.Assign):
            return None, ""
        if isinstance(binding.value, ast.Attribute) and binding.value.attr in _SAVED_TENSORS:
            position = find_position(binding.targets[0], name)
            return (None, "") if position is None else (node, position)
        assigned = find_assigned_expression(binding, name)
        if assigned is None:
            return None, ""
        node = assigned
    return None, ""


def _casts(node: ast.expr, frame: CallFrame, dtype: torch.dtype) -> bool:
    return isinstance(node, ast.Call) and read_cast_dtype(node, frame) == dtype


def _read_context_attribute(node: ast.expr, frame: CallFrame, context: Any) -> str:
    """Returns the attribute of the context that an expression such as `ctx.weight.t()` reads, or ""."""
    match _strip(node):
        case ast.Attribute(ast.Name() as owner, attribute):
            return attribute if read_value(owner, frame) is context else ""
    return ""


def _strip(node: ast.expr) -> ast.expr:
    """Returns the tensor of which an expression is a part or a view: `weight` of `weight[0].t()`."""
    while True:
        match node:
            case ast.Subscript(value) | ast.Call(ast.Attribute(value)):
                node = value
            case ast.Attribute(value, "T" | "mT" | "data"):
                node = value
            case _:
                return node


def _root_name(node: ast.expr) -> str:
    node = _strip(node)
    return node.id if isinstance(node, ast.Name) else ""


def _iterate_saved(scope: ast.AST) -> Iterator[tuple[int | str, str]]:
    """Yields the variables that forward saves."""
    for node in ast.walk(scope):
        match node:
            case ast.Call(ast.Attribute(_, "save_for_backward"), arguments):
                for position, argument in enumerate(arguments):
                    if isinstance(argument, ast.Name):
                        yield position, argument.id
            case ast.Assign([ast.Attribute(ast.Name(), attribute)], ast.Name(name)):
                yield attribute, name


def _name_in_backward(saved: dict[int | str, str], frame: CallFrame) -> dict[str, str]:
    """Returns the variables with which backward reads the tensors that forward saved."""
    names = {}
    for node in ast.walk(frame.scope or ast.Pass()):
        match node:
            case ast.Assign([ast.Tuple(targets)], ast.Attribute(_, attribute)):
                if attribute not in _SAVED_TENSORS:
                    continue
                for position, target in enumerate(targets):
                    if position in saved and isinstance(target, ast.Name):
                        names[saved[position]] = target.id
    return names


def _iterate_casts(scope: ast.AST, name: str) -> Iterator[ast.Call]:
    """Yields the casts of a variable, or of a part of it."""
    for node in ast.walk(scope):
        match node:
            case ast.Call(ast.Attribute(value, method)) if method in CASTING_METHODS:
                if _root_name(value) == name:
                    yield node


def _cast_like(
    cast: ast.Call,
    value: ast.expr,
    renamed: dict[str, str],
    frame: CallFrame,
    wanted: torch.dtype,
) -> str:
    """Returns the code that casts an expression of backward as forward does, or "" if forward casts
    to another dtype than `wanted`.
    """
    copied = copy.deepcopy(cast)
    assert isinstance(copied.func, ast.Attribute)
    copied.func.value = value
    for argument in _iterate_names(copied.args):
        if argument.id in renamed:
            argument.id = renamed[argument.id]
    copied = ast.parse(ast.unparse(copied), mode="eval").body  # type: ignore[assignment]
    return source_text(copied) if read_cast_dtype(copied, frame) == wanted else ""


def _iterate_names(nodes: Sequence[ast.expr]) -> Iterator[ast.Name]:
    for node in nodes:
        yield from (part for part in ast.walk(node) if isinstance(part, ast.Name))
