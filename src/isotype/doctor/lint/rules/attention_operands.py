"""Attention of which some operands are cast to fp32, and one that was made beside them is not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from ..source import Function, SourceFile, bindings, last_name
from .low_dtypes import is_upcast

_ATTENTION = frozenset({"scaled_dot_product_attention", "memory_efficient_attention", "flash_attn_func"})
_OPERANDS = ("query", "key", "value", "q", "k", "v")
_KEEPS = frozenset({"contiguous", "transpose", "view", "reshape", "permute", "unsqueeze", "flatten", "unflatten", "expand", "clone"})


@dataclass(frozen=True, slots=True)
class CastInPart:
    """call: the attention; wide: the operand cast in line `cast`; left: the one that is not; made: the line that makes both."""

    call: ast.Call
    wide: str
    left: str
    cast: int
    made: int


def cast_in_part(file: SourceFile, function: Function) -> Iterator[CastInPart]:
    """Calls that take names bound by one statement, `q, k, v = ...`, of which some are cast to fp32 by then."""
    nodes = [n for n in file.own(function) if isinstance(n, (ast.Assign, ast.Call))]
    if not any(isinstance(n, ast.Call) and last_name(n.func) in _ATTENTION for n in nodes):
        return
    wide: dict[str, int] = {}  # name -> the line of its cast
    together: list[tuple[set[str], int]] = []
    for node in sorted(nodes, key=lambda n: (n.end_lineno or n.lineno, isinstance(n, ast.Assign))):  # a statement after the calls in it
        if isinstance(node, ast.Call):
            if last_name(node.func) in _ATTENTION:
                yield from _parts(node, wide, together)
            continue
        for target, value in bindings(node):
            if isinstance(target, ast.Name):
                if any(isinstance(n, ast.Call) and is_upcast(file, n) for n in ast.walk(value)):
                    wide[target.id] = node.lineno
                elif not _is_view(value, target.id):
                    wide.pop(target.id, None)
            elif isinstance(target, ast.Tuple):
                names = {t.id for t in target.elts if isinstance(t, ast.Name)}
                together = [(group - names, line) for group, line in together] + [(names, node.lineno)]
                for name in names:
                    wide.pop(name, None)


def _parts(call: ast.Call, wide: dict[str, int], together: list[tuple[set[str], int]]) -> Iterator[CastInPart]:
    given = [*call.args[:3], *(k.value for k in call.keywords if k.arg in _OPERANDS)]
    names = [g.id for g in given if isinstance(g, ast.Name)]
    for left in (n for n in names if n not in wide):
        for group, line in together:
            cast = [n for n in names if n in wide and {n, left} <= group]
            if cast:
                yield CastInPart(call, cast[0], left, wide[cast[0]], line)
                return


def _is_view(value: ast.expr, name: str) -> bool:
    """`q.contiguous()` and its like, of this name."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _KEEPS:
        value = value.func.value
    return isinstance(value, ast.Name) and value.id == name
