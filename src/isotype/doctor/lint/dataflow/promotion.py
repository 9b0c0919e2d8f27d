"""Arithmetic on tensors and numbers: the promoted dtype."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from ....dtypes import promote
from .values import (
    UNKNOWN,
    Items,
    Made,
    Method,
    Module,
    Scalar,
    Tensor,
)

if TYPE_CHECKING:
    from .interpreter import Interpreter


def arithmetic(run: Interpreter, node: ast.BinOp | ast.AugAssign, left: Any, right: Any) -> Any:
    """`a + b` of tensors and numbers."""
    if isinstance(node, ast.BinOp):
        sources = [node.left, node.right]
    else:
        sources = [node.target, node.value]
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        result = elementwise(run, node, [left, right], sources)
        if isinstance(node.op, ast.Pow) and isinstance(left, Scalar) and left.value in (2, 2.0) and isinstance(result, Tensor):
            return result.but(positional=False, lowered=None, frequency=False)  # powers of two are exact in every dtype
        return result
    if isinstance(left, Scalar) and isinstance(right, Scalar):
        return Scalar()
    return UNKNOWN


def elementwise(run: Interpreter, node: ast.AST, values: list[Any], sources: list[ast.expr]) -> Any:
    """The promoted dtype of operands; numbers do not take part (an integer tensor times a float number is fp32)."""
    result = _promoted(run, node, values)
    frequency = any(isinstance(v, Tensor) and v.frequency for v in values)
    return result.but(frequency=True) if frequency and isinstance(result, Tensor) and not result.frequency else result


def _promoted(run: Interpreter, node: ast.AST, values: list[Any]) -> Any:
    tensors = [v for v in values if isinstance(v, Tensor)]
    if not tensors:
        return UNKNOWN
    positional = any(t.positional for t in tensors)
    lowered = next((t.lowered for t in tensors if t.lowered is not None), None)
    on_cpu = all(t.on_cpu for t in tensors)
    if any(v is UNKNOWN or isinstance(v, (Module, Method)) for v in values) or any(t.dtype is None for t in tensors):
        wide = next((t for t in tensors if t.dtype == "fp32" and t.zero_dim is False), None)
        if wide is None:
            return Tensor(None, positional=positional, lowered=lowered)
        return wide.but(positional=positional, lowered=lowered, buffer=None, on_cpu=on_cpu)  # what is not known is hardly fp64
    winner = _winner(tensors)
    if winner is None:
        return Tensor(None, positional=positional, lowered=lowered)
    numbers = [v for v in values if isinstance(v, Scalar)]
    if not winner.floating and (any(isinstance(n.value, float) or n.value is UNKNOWN for n in numbers) or _divides(node)):
        word = "fp32" if any(isinstance(n.value, float) for n in numbers) or _divides(node) else None
        return Tensor(
            word, Made.DEFAULT, f"an integer tensor in `{run.text(node)}`", node, winner.zero_dim, positional, lowered, on_cpu=on_cpu
        )
    zero_dim: bool | None = False if any(t.zero_dim is False for t in tensors) else (True if all(t.zero_dim for t in tensors) else None)
    return winner.but(zero_dim=zero_dim, positional=positional, lowered=lowered, buffer=None, on_cpu=on_cpu)


def _divides(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)


def _winner(tensors: list[Tensor]) -> Tensor | None:
    """The tensor whose dtype the result has; None when that depends on dimensions that are not known."""
    floating = [t for t in tensors if t.floating]
    if not floating:
        return tensors[0] if len({t.dtype for t in tensors}) == 1 else Tensor("int64", tensors[0].made, node=tensors[0].node)
    if len({t.dtype for t in floating}) == 1:
        return floating[0]
    certain = [t for t in floating if t.zero_dim is False]
    doubtful = [t for t in floating if t.zero_dim is None]
    pool = certain or floating
    word = pool[0].dtype or ""
    if any((t.dtype or "").startswith("fp8") for t in floating):
        return None  # torch promotes no float8
    for tensor in pool[1:]:
        word = promote(word, tensor.dtype or "")
    if any(promote(word, t.dtype or "") != word for t in doubtful):
        return None
    return next((t for t in pool if t.dtype == word), Tensor(word, node=pool[0].node))


def promote_call(run: Interpreter, name: str, args: list[Any], nodes: list[ast.expr], kwargs: dict[str, Any], node: ast.Call) -> Any:
    if name in ("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "block_diag"):
        pieces = args[0] if args else kwargs.get("tensors", UNKNOWN)
        if isinstance(pieces, Items):
            values = pieces.known if pieces.known is not None else [pieces.each]
            result = elementwise(run, node, values, [])
            return result.but(zero_dim=False) if isinstance(result, Tensor) else UNKNOWN
        return UNKNOWN
    if name == "meshgrid":
        axes = args[0].known if args and isinstance(args[0], Items) else args
        return Items(known=list(axes)) if axes is not None else UNKNOWN
    if name == "where" and len(args) == 1:
        return Items(each=Tensor("int64"))
    return elementwise(run, node, args[1:] if name == "where" and len(args) == 3 else args, nodes)
