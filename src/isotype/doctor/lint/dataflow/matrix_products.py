"""Matrix products: what autocast casts, and what torch refuses to mix."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from . import torch_names as names
from .promotion import elementwise
from .values import (
    UNFOLLOWED,
    UNKNOWN,
    Dtype,
    Env,
    Items,
    Labelled,
    Made,
    Scalar,
    Tensor,
)
from .writes import note_in_place

if TYPE_CHECKING:
    from .interpreter import Interpreter


def matrix_product(run: Interpreter, name: str, node: ast.expr | ast.stmt, operands: list[Labelled]) -> Any:
    """A product that autocast covers: cast under autocast, else all operands alike or refused."""
    tensors = [(label, v) for label, v in operands if isinstance(v, Tensor)]
    if not tensors:
        return UNKNOWN
    positional = any(t.positional for _, t in tensors)
    lowered = next((t.lowered for _, t in tensors if t.lowered is not None), None)
    elsewhere = run.scenario.device != "cpu"
    if run.autocast and not (elsewhere and all(t.on_cpu for _, t in tensors)):
        if any(t.dtype == "fp64" for _, t in tensors):
            return Tensor("fp64", positional=positional)
        # positions made on the CPU and multiplied there; of other tensors a missing `device=` may be an oversight
        if positional and run.autocast in ("bf16", "fp16") and not (elsewhere and any(t.on_cpu and t.positional for _, t in tensors)):
            lowered = lowered or node
        why = f"`{run.text(node)}` under autocast (line {node.lineno})"
        return Tensor(run.autocast, Made.AUTOCAST, why, node, positional=positional, lowered=lowered)
    _same_dtype(run, "attention" if name == names.ATTENTION else "matmul", node, name, tensors)
    known = next((t for _, t in tensors if t.dtype is not None), UNFOLLOWED)
    if len(tensors) < len(operands) and known.made is not Made.LITERAL:
        known = known if any(v is not UNKNOWN for _, v in operands) else UNFOLLOWED
    frequency = any(t.frequency for _, t in tensors)
    return known.but(zero_dim=False, positional=positional, lowered=lowered, buffer=None, frequency=frequency)


def _same_dtype(run: Interpreter, kind: Any, node: ast.expr | ast.stmt, name: str, tensors: list[tuple[str, Tensor]]) -> None:
    floating = [(label, t) for label, t in tensors if t.floating]
    for label, tensor in floating[1:]:
        if tensor.dtype != floating[0][1].dtype:
            run.refuse(kind, node, name, floating[0], (label, tensor))


def product_call(
    run: Interpreter, name: str, args: list[Any], nodes: list[ast.expr], kwargs: dict[str, Any], node: ast.Call, env: Env
) -> Any:
    labelled: list[Labelled] = [(run.text(n), v) for n, v in zip(nodes, args)]
    labelled += [
        (f"{k}=", v)
        for k, v in kwargs.items()
        if k in ("input", "mat1", "mat2", "weight", "bias", "other", "tensor", "key", "query", "value")
    ]
    if name in ("einsum", "multi_dot", "chain_matmul"):
        flat: list[Labelled] = []
        for label, value in labelled:
            inner = value.known if isinstance(value, Items) and value.known is not None else [value]
            flat += [(label, v) for v in inner]
        labelled = [pair for pair in flat if not isinstance(pair[1], Scalar)]
        if name == "einsum" and len(labelled) == 1:
            return labelled[0][1] if isinstance(labelled[0][1], Tensor) else UNKNOWN
        if name == "einsum" and run.autocast is None and _sums_nothing(args[0]):
            return elementwise(run, node, [v for _, v in labelled], [])  # torch multiplies, and promotes as for `*`
    if name == names.ATTENTION:
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        labelled = labelled[:3] + ([("attn_mask", mask)] if isinstance(mask, Tensor) and mask.floating else [])
    elif name in ("linear", "bilinear") or name.startswith(("conv", "addmm", "addbmm", "baddbmm", "addmv")):
        labelled = labelled[:3]
    elif name not in ("einsum", "multi_dot", "chain_matmul"):
        labelled = labelled[:2]
    if any(v is UNKNOWN for _, v in labelled[:2]) and run.autocast is None and not isinstance(kwargs.get("out"), Tensor):
        known = [t for _, t in labelled if isinstance(t, Tensor)]
        return known[0].but(zero_dim=False, buffer=None) if known else UNFOLLOWED
    out = kwargs.get("out")
    if name in names.LOWER_IN_PLACE or isinstance(out, Tensor):
        return _uncovered_product(run, name, labelled, out, kwargs, node, env)
    dtype = kwargs.get("out_dtype")
    result = matrix_product(run, name, node, labelled)
    return result.but(dtype=dtype.word, made=Made.LITERAL) if isinstance(dtype, Dtype) and isinstance(result, Tensor) else result


def _sums_nothing(equation: Any) -> bool:
    """Whether an einsum of two tensors sums over no index that both have: an outer or an elementwise product."""
    if not isinstance(equation, Scalar) or not isinstance(equation.value, str) or equation.value.count(",") != 1:
        return False
    sources, arrow, result = equation.value.replace(" ", "").partition("->")
    left, right = map(set, sources.split(","))
    return left & right <= set(result) if arrow else not left & right - {"."}


def _uncovered_product(
    run: Interpreter, name: str, labelled: list[Labelled], out: Any, kwargs: dict[str, Any], node: ast.Call, env: Env
) -> Any:
    """`out=` and in-place products: autocast casts nothing, so every operand and the destination must already agree."""
    tensors = [(label, v) for label, v in labelled if isinstance(v, Tensor)]
    in_place = name in names.LOWER_IN_PLACE
    if "out_dtype" in kwargs:  # the destination may be wider; the factors may not differ
        factors = tensors[-2:] if name.startswith(("add", "badd")) else tensors
        _same_dtype(run, "out", node, name, factors)
    else:
        destination = [] if in_place else [("out=", out)]
        _same_dtype(run, "in_place" if in_place else "out", node, name, [*tensors, *destination])
    target = labelled[0][1] if in_place else out
    source = node.func.value if in_place and isinstance(node.func, ast.Attribute) else None
    if not in_place:
        source = next((k.value for k in node.keywords if k.arg == "out"), None)
        if not (name.startswith(("add", "badd")) and node.args and source and ast.dump(node.args[0]) == ast.dump(source)):
            source = None  # overwritten, not added to
    if isinstance(source, ast.Name) and isinstance(target, Tensor):
        added = tensors[-1][1] if tensors else UNFOLLOWED
        note_in_place(run, source, node, target, added, node, env)
    return target if isinstance(target, Tensor) else UNFOLLOWED
