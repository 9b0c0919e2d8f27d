"""What torch's functions and a tensor's methods do to dtypes, as torch 2.13 does it."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from ....dtypes import is_float
from . import torch_names as names
from .casts import cast, cast_call, factory
from .matrix_products import product_call
from .promotion import elementwise, promote_call
from .values import (
    UNFOLLOWED,
    UNKNOWN,
    Dtype,
    Env,
    Items,
    Made,
    Scalar,
    Tensor,
)
from .writes import note_in_place, scatter_call

if TYPE_CHECKING:
    from .interpreter import Interpreter


def torch_call(
    run: Interpreter, name: str, args: list[Any], nodes: list[ast.expr], kwargs: dict[str, Any], node: ast.Call, env: Env
) -> Any:
    """A function of torch or method of a tensor: `args` with the tensor itself first, `nodes` their sources."""
    first = args[0] if args else kwargs.get("input", UNKNOWN)
    out = kwargs.get("out")
    if name in names.NOT_IN_BF16:
        return spectrum(run, name, args)
    if name in names.LOWER or name in names.LOWER_IN_PLACE:
        return product_call(run, name, args, nodes, kwargs, node, env)
    if name in names.SCATTER:
        return scatter_call(run, name, args, nodes, kwargs, node)
    if name in names.IN_PLACE:
        if (
            isinstance(first, Tensor)
            and name in ("add_", "sub_", "addcmul_")
            and nodes
            and isinstance(nodes[0], (ast.Name, ast.Subscript))
            and len(args) > 1
        ):
            note_in_place(run, nodes[0], node, first, args[1], node, env)
        return first
    if isinstance(out, Tensor):
        target = next((k.value for k in node.keywords if k.arg == "out"), None)
        own = [ast.dump(n) == ast.dump(target) for n in nodes[:2]] if target is not None and name in ("add", "sub") else []
        if target is not None and sum(own) == 1 and len(args) > 1:  # torch.add(total, part, out=total)
            at = own.index(False)
            note_in_place(run, target, node, out, args[at], nodes[at], env)
        return out
    if name in names.LIKE or name in names.NEW or name in names.FACTORIES:
        return factory(run, name, args, kwargs, node)
    if name in ("to", "type", "type_as"):
        return cast_call(run, name, args, kwargs, node)
    if name in names.CASTS and isinstance(first, Tensor):
        return cast(run, first, Dtype(names.CASTS[name], f".{name}()", literal=True), node)
    if name in names.PROMOTE:
        others = [kwargs[k] for k in ("other", "tensor1", "tensor2", "vec2") if k in kwargs]
        return promote_call(run, name, [*args, *others], nodes, kwargs, node)
    if name == "is_floating_point" and isinstance(first, Tensor) and first.dtype is not None:
        return Scalar(first.floating)
    if name in names.NOT_TENSOR:
        return Scalar()
    if name in names.TO_INTEGER:
        one = Tensor("int64")
        return Items(each=one) if name == "nonzero" and "as_tuple" in kwargs else one
    if name in names.TO_BOOL:
        return Tensor("bool")
    if name in ("finfo", "iinfo", "no_grad", "enable_grad", "device", "Size", "manual_seed"):
        return Scalar()
    if not isinstance(first, Tensor):
        return UNKNOWN
    if name in ("cos", "sin", "polar"):
        at = 1 if name == "polar" and len(args) > 1 else 0  # polar(radius, angle)
        angle = args[at] if isinstance(args[at], Tensor) else UNFOLLOWED
        if angle.positional:
            run.emit("table", node, name, (run.text(nodes[at]), angle))
            first = first.but(positional=False, frequency=False, lowered=None)  # what comes out is a table, and no position
        if (angle.positional or angle.frequency) and angle.dtype == "fp32":
            first = first.but(made=Made.LITERAL, why=f"the table of `{run.text(node)}` (line {node.lineno})")
    if name in names.SPLIT:
        return Items(each=first.but(buffer=None))
    if name in names.VALUES_AND_INDICES or (name in ("max", "min", "median", "cummax") and (len(args) > 1 or "dim" in kwargs)):
        return (
            Items(known=[first, Tensor("int64")])
            if not (len(args) > 1 and isinstance(args[1], Tensor))
            else elementwise(run, node, args[:2], nodes)
        )
    if name in names.LOSS:
        return _reduced(_autocast_result(run, name, _with_dtype(run, first, kwargs, node)), kwargs)
    if name in names.REDUCE:
        result = _autocast_result(run, name, _with_dtype(run, first, kwargs, node))
        whole = len(args) == 1 and "dim" not in kwargs and "axis" not in kwargs
        if first.dtype is not None and not is_float(first.dtype) and name in ("sum", "prod"):
            result = result.but(dtype="int64") if "dtype" not in kwargs else result
        return result.but(zero_dim=True) if whole else result
    if name == "embedding":
        return args[1] if len(args) > 1 else UNFOLLOWED
    if name == "cumsum" and first.dtype in ("int64", "int32", "bool"):
        return Tensor("int64", positional=True)  # ones counted up
    if name == "cuda":
        first = first.but(on_cpu=False)
    if name in names.PART:
        first = first.but(buffer=None)
    if name in ("layer_norm", "group_norm", "rms_norm", "instance_norm") and run.autocast is None:
        _refuse_narrow_weight(run, name, args, nodes, kwargs, node)
    if name in names.KEEP:
        return _autocast_result(run, name, _with_dtype(run, first, kwargs, node))
    return UNKNOWN


def _refuse_narrow_weight(
    run: Interpreter, name: str, args: list[Any], nodes: list[ast.expr], kwargs: dict[str, Any], node: ast.Call
) -> None:
    """torch normalises an fp32 input with fp32 weights only; a narrower input may have fp32 weights."""
    at = 1 if name == "instance_norm" else 2
    weight = kwargs.get("weight", args[at] if len(args) > at else None)
    if isinstance(weight, Tensor) and weight.low and args[0].dtype == "fp32":
        label = run.text(nodes[at]) if len(nodes) > at else "weight"
        run.refuse("matmul", node, name, (run.text(nodes[0]), args[0]), (label, weight))


def spectrum(run: Interpreter, name: str, args: list[Any]) -> Any:
    """A function of torch.fft, or one that factorises: none takes bf16."""
    if args and isinstance(args[0], Tensor) and args[0].dtype == "bf16":
        run.has_no_kernel()
    keeps = name in ("inverse", "pinverse", "inv", "pinv", "cholesky") and args and isinstance(args[0], Tensor)
    return args[0] if keeps else UNKNOWN


def _with_dtype(run: Interpreter, tensor: Tensor, kwargs: dict[str, Any], node: ast.Call) -> Tensor:
    """softmax(x, dtype=...) and its like cast first."""
    dtype = kwargs.get("dtype")
    if dtype is None or (isinstance(dtype, Scalar) and dtype.value is None):
        return tensor
    return cast(run, tensor, dtype, node) if isinstance(dtype, Dtype) else tensor.but(dtype=None)


def _autocast_result(run: Interpreter, name: str, tensor: Tensor) -> Tensor:
    if run.autocast and tensor.low and name in names.DEVICE_DEPENDENT:
        return tensor.but(dtype=None)
    return tensor


def _reduced(tensor: Tensor, kwargs: dict[str, Any]) -> Tensor:
    reduction = kwargs.get("reduction", Scalar("mean"))
    known = reduction.value if isinstance(reduction, Scalar) else UNKNOWN
    return tensor.but(zero_dim=None if known is UNKNOWN else known != "none")
