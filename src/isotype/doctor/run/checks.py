"""Reads the program's own checks of dtypes: the comparison of an `assert`, or that of the `if` around
a `raise`. A check may compare dtypes, or ask for one of several, as in `x.dtype in (...)`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

import torch

from .arguments import find_passed_argument
from .bindings import is_name
from .dtype_examples import resolve_variable
from .expressions import is_tensor, read_value
from .frames import CallFrame

# words of conditions that compare sizes, and of those that concern dtypes
_SIZE = re.compile(r"\b(?:numel|shape|size|len|sum|n?dim)\b")
_TYPE = re.compile(r"type|element_size|itemsize|is_floating|bits")
_MAX_VARIABLES = 6  # variables and arguments through which a dtype is followed


def find_compared_dtypes(frame: CallFrame) -> ast.Compare | None:
    """Returns the comparison of dtypes that failed in a frame. A condition may join it with others,
    as in `if x.dtype != y.dtype or x.shape != y.shape: raise`: then its dtypes must differ.
    """
    comparisons = _find_comparisons(frame)
    if len(comparisons) == 1:
        return comparisons[0]
    return next((part for part in comparisons if _has_different_dtypes(part, frame)), None)


def find_check_operands(frames: Sequence[CallFrame]) -> list[tuple[ast.expr, int]]:
    """Returns the tensors whose dtypes a failed check of the innermost frame compares, each with the
    index of its frame.
    """
    index = len(frames) - 1
    frame = frames[index]
    comparison = find_compared_dtypes(frame)
    if comparison is None or not _has_different_dtypes(comparison, frame):
        return []
    allowed = read_allowed_dtypes(comparison, frame)
    if allowed is not None:
        return [(node, index) for node in find_refused_tensors(comparison, allowed, frame)]
    sides = [comparison.left, *comparison.comparators]
    owners = [find_dtype_owner(side, frames) for side in sides]
    return [owner for owner in owners if owner is not None]


def find_dtype_owner(node: ast.expr, frames: Sequence[CallFrame]) -> tuple[ast.expr, int] | None:
    """Returns the expression `x` of `x.dtype`, if `x` is a tensor that can be read, and the index of
    its frame. A variable of the innermost frame that holds a dtype is followed to the expression
    that was assigned to it, and to the calls that passed it.
    """
    index = len(frames) - 1
    for _ in range(_MAX_VARIABLES):
        owner = read_dtype_owner(node, frames[index])
        if owner is not None:
            return owner, index
        if not isinstance(node, ast.Name):
            return None
        source: ast.expr | None = resolve_variable(node, frames[index])
        if source is node:
            if index == 0:
                return None
            source = find_passed_argument(frames[index], frames[index - 1], node.id)
            index -= 1
        if source is None:
            return None
        node = source
    return None


def find_refused_tensors(
    comparison: ast.Compare, allowed: Sequence[torch.dtype], frame: CallFrame
) -> list[ast.expr]:
    """Returns the tensor whose dtype a check refuses, and the other parameters of the function that
    the check would refuse too. Returns nothing if the tensor cannot be read.
    """
    owner = read_dtype_owner(comparison.left, frame)
    if owner is None:
        return []
    count = frame.code.co_argcount + frame.code.co_kwonlyargcount
    names = [name for name in frame.code.co_varnames[:count] if not is_name(owner, name)]
    values = {name: frame.variables.get(name) for name in names}
    refused = [
        ast.Name(name, ast.Load())
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype not in allowed
    ]
    return [owner, *refused]


def find_check_location(frame: CallFrame) -> str:
    """Returns the file and line of the check that failed in a frame: of the `assert`, or of the `if`
    around the `raise`.
    """
    comparison = find_compared_dtypes(frame)
    return "" if comparison is None else frame.location_of(comparison)


def fails_for_other_reason(frame: CallFrame) -> bool:
    """True if the condition of a failed check compares dtypes that are equal: it failed for its other
    part, such as a comparison of shapes. Also true if the condition only compares sizes, and the
    message of the check adds a dtype.
    """
    comparisons = _find_comparisons(frame)
    text = " ".join(ast.unparse(part) for part in comparisons)
    if _SIZE.search(text) and not _TYPE.search(text):
        return True
    read = [part for part in comparisons if len(_read_dtypes(part, frame)) > 1]
    return bool(read) and not any(_has_different_dtypes(part, frame) for part in comparisons)


def read_dtype_owner(node: ast.expr, frame: CallFrame) -> ast.expr | None:
    """Returns the expression `x` of `x.dtype`, if `x` is a tensor that can be read."""
    if not isinstance(node, ast.Attribute) or node.attr != "dtype":
        return None
    return node.value if is_tensor(read_value(node.value, frame)) else None


def read_allowed_dtypes(comparison: ast.Compare, frame: CallFrame) -> list[torch.dtype] | None:
    """Returns the dtypes of `x.dtype in (torch.float16, torch.bfloat16)`. Returns None for other
    comparisons, and if a dtype cannot be read.
    """
    match comparison:
        case ast.Compare(_, [ast.In() | ast.NotIn()], [members]):
            values = read_value(members, frame)
            if not isinstance(values, (list, tuple, set, frozenset, dict)):
                return None
            allowed = [value for value in values if isinstance(value, torch.dtype)]
            return allowed if allowed and len(allowed) == len(values) else None
    return None


def _find_comparisons(frame: CallFrame) -> list[ast.Compare]:
    """Returns the comparisons of the running `assert`, or of the `if` around the running `raise`."""
    statement = frame.statement
    if isinstance(statement, ast.Assert):
        return list(_iterate_comparisons(statement.test, is_raised_if=False))
    if isinstance(statement, ast.Raise) and frame.scope is not None:
        for branch in ast.walk(frame.scope):
            if isinstance(branch, ast.If) and any(part is statement for part in branch.body):
                return list(_iterate_comparisons(branch.test, is_raised_if=True))
    return []


def _iterate_comparisons(test: ast.expr, *, is_raised_if: bool) -> Iterator[ast.Compare]:
    """Yields the comparisons of a condition that make a check fail.

    is_raised_if  the value of the condition with which the check fails
    """
    match test:
        case ast.BoolOp(_, values):
            for value in values:
                yield from _iterate_comparisons(value, is_raised_if=is_raised_if)
        case ast.UnaryOp(ast.Not(), operand):
            yield from _iterate_comparisons(operand, is_raised_if=not is_raised_if)
        case ast.Compare(_, operators):
            kinds: tuple[type[ast.cmpop], ...] = (ast.Eq, ast.Is, ast.In)
            if is_raised_if:
                kinds = (ast.NotEq, ast.IsNot, ast.NotIn)
            if all(isinstance(operator, kinds) for operator in operators):
                yield test


def _read_dtypes(comparison: ast.Compare, frame: CallFrame) -> list[torch.dtype]:
    """Returns the dtypes that a comparison compares. Returns none if a side is no dtype, or cannot be
    read.
    """
    sides = [comparison.left, *comparison.comparators]
    dtypes = [read_value(side, frame) for side in sides]
    return dtypes if all(isinstance(dtype, torch.dtype) for dtype in dtypes) else []


def _has_different_dtypes(comparison: ast.Compare, frame: CallFrame) -> bool:
    allowed = read_allowed_dtypes(comparison, frame)
    if allowed is None:
        return len(set(_read_dtypes(comparison, frame))) > 1
    dtype = read_value(comparison.left, frame)
    return isinstance(dtype, torch.dtype) and dtype not in allowed
