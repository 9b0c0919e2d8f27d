"""Finds the expression of a line that calls an operator. A line such as
`loss = (p * (p.log() - q.log())).sum()` calls several operators of the same name.
"""

from __future__ import annotations

import ast
import linecache
from dataclasses import dataclass
from itertools import islice
from types import CodeType
from typing import NamedTuple

from ....observe.origin import Site, innermost_frame

_INSTRUCTION_SIZE = 2  # bytes


class Position(NamedTuple):
    """A line of a running function, and the offset of the instruction that is running; -1 if it is
    not known.
    """

    site: Site
    instruction: int = -1


@dataclass(frozen=True, slots=True)
class Part:
    """An expression of a statement.

    is_one_of_several  whether the statement has other expressions of the same kind, such as a
                       second logarithm
    """

    node: ast.expr
    is_one_of_several: bool

    @property
    def text(self) -> str:
        return ast.unparse(self.node)


def find_position(outer: CodeType | None = None) -> Position | None:
    """Returns the innermost running position outside the code of PyTorch, Python and observers.
    Returns None if there is no such position inside the function `outer`.
    """
    frame = innermost_frame(outer)
    return None if frame is None else Position(Site(frame.f_code, frame.f_lineno), frame.f_lasti)


def read_part(position: Position | None) -> Part | None:
    """Returns the expression that an instruction computes, such as a call or a quotient."""
    if position is None or position.instruction < 0:
        return None
    code = position.site.code
    ranges = islice(code.co_positions(), position.instruction // _INSTRUCTION_SIZE, None)
    place = next(ranges, (None,) * 4)
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError):
        return None
    node: ast.expr | None = None
    statement: ast.stmt | None = None
    for candidate in ast.walk(tree):  # the outer statements come first
        if isinstance(candidate, ast.stmt) and _contains(candidate, place):
            statement = candidate
        if isinstance(candidate, ast.expr) and _read_place(candidate) == place:
            node = node or candidate
    if node is None or statement is None:
        return None
    kind = _read_kind(node)
    count = sum(_read_kind(other) == kind for other in ast.walk(statement))
    return Part(node, bool(kind) and count > 1)


def _read_place(node: ast.expr | ast.stmt) -> tuple[int | None, ...]:
    return (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)


def _contains(node: ast.stmt, place: tuple[int | None, ...]) -> bool:
    line, end_line, column, end_column = place
    if line is None or end_line is None or node.end_lineno is None:
        return False
    starts_before = (node.lineno, node.col_offset) <= (line, column or 0)
    return starts_before and (end_line, end_column or 0) <= (node.end_lineno, node.end_col_offset)


def _read_kind(node: ast.AST) -> str:
    """Returns the name of the function that an expression calls, or of its operator."""
    match node:
        case ast.Call(ast.Attribute(_, name)) | ast.Call(ast.Name(name)):
            return name
        case ast.BinOp(_, operator, _):
            return type(operator).__name__
    return ""


def read_input(node: ast.expr) -> ast.expr | None:
    """Returns the input of a function of one tensor, such as `q` in `q.log()`, `torch.log(q)` and
    `q ** 0.5`.
    """
    match node:
        case ast.BinOp(left, ast.Pow(), _) | ast.Call(ast.Attribute(left, "pow"), [_]):
            return left
        case ast.Call(ast.Attribute(ast.Name("torch" | "F" | "math")), [first, *_]):
            return first
        case ast.Call(ast.Attribute(owner, _), []):
            return owner
    return None


def read_condition(node: ast.expr) -> ast.expr | None:
    """Returns the condition of an expression that selects values, such as `mask` in
    `torch.where(mask, x, y)`, `x.masked_fill(mask, 0)` and `x[mask]`.
    """
    match node:
        case ast.Call(ast.Attribute(ast.Name("torch"), "masked_fill"), [_, condition, *_]):
            return condition
        case ast.Call(ast.Attribute(_, "where" | "masked_fill" | "masked_fill_"), [condition, *_]):
            return condition
        case ast.Subscript(_, condition) if not isinstance(condition, ast.Tuple):
            return condition
    return None
