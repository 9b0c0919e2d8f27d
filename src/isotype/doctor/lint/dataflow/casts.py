"""Casts and factories: where a dtype is chosen."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

from . import torch_names as names
from .values import (
    UNFOLLOWED,
    UNKNOWN,
    Dtype,
    Items,
    Made,
    Module,
    Scalar,
    Tensor,
)

if TYPE_CHECKING:
    from .interpreter import Interpreter


def cast(run: Interpreter, tensor: Tensor, dtype: Dtype, node: ast.expr) -> Tensor:
    """The tensor in another dtype; a cast to what it already is changes nothing, its history included."""
    if dtype.word is not None and dtype.word == tensor.dtype and not ((tensor.positional or tensor.frequency) and tensor.low):
        return tensor.but(made=Made.LITERAL) if dtype.literal and tensor.made is Made.DEFAULT else tensor
    made = Made.LITERAL if dtype.literal else Made.FOLLOWS
    lowered = tensor.lowered
    if dtype.word in ("bf16", "fp16") and (tensor.positional or tensor.frequency):
        lowered = lowered or node
    return tensor.but(
        dtype=dtype.word, made=made, why=f"cast by `{run.text(node)}` (line {node.lineno})", node=node, lowered=lowered, buffer=None
    )


def cast_call(run: Interpreter, name: str, args: list[Any], kwargs: dict[str, Any], node: ast.Call) -> Any:
    if not args or not isinstance(args[0], Tensor):
        return UNKNOWN
    tensor = args[0]
    wanted = kwargs.get("dtype")
    if name != "type" and not (len(args) == 2 and isinstance(args[1], Dtype) and not kwargs):
        tensor = tensor.but(on_cpu=False)
    for candidate in [*args[1:], *([wanted] if wanted is not None else []), kwargs.get("other")]:
        if isinstance(candidate, Dtype):
            return cast(run, tensor, candidate, node)
        if isinstance(candidate, Tensor):
            return cast(run, tensor, Dtype(candidate.dtype, "another tensor's"), node)
    if name == "type" and not args[1:] and wanted is None:
        return Dtype(tensor.dtype, "its type()")
    if wanted is UNKNOWN:
        return tensor.but(dtype=None, buffer=None)
    # `.to(device)`: an argument that is not understood may be a dtype as well, unless it is called a device
    doubtful = [a for a in args[1:] if a is UNKNOWN or isinstance(a, Module)]
    if doubtful and not all("device" in ast.unparse(a) or "rank" in ast.unparse(a) for a in node.args):
        return tensor.but(dtype=None, buffer=None)
    return tensor


def factory(run: Interpreter, name: str, args: list[Any], kwargs: dict[str, Any], node: ast.Call) -> Any:
    text = run.text(node)
    dtype = kwargs.get("dtype")
    # only an empty shape written out makes a tensor without dimensions
    zero_dim: bool | None = bool(args) and isinstance(args[0], Items) and args[0].known == []
    if name in ("tensor", "as_tensor", "scalar_tensor"):
        data = args[0] if args else UNKNOWN
        zero_dim = True if isinstance(data, Scalar) else (None if not isinstance(data, Items) else False)
    counted = [*node.args, *(k.value for k in node.keywords if k.arg in ("start", "end", "step"))]
    positional = name == "arange" and not any(_COUNTS_FEATURES.search(ast.unparse(a)) for a in counted)
    frequency = name == "arange" and not positional  # counts features: what is made from them are frequencies
    on_cpu = name in names.FACTORIES and not any(k.arg in ("device", None) for k in node.keywords)
    buffer = node if name.startswith(("zeros", "empty", "new_zeros", "new_empty", "full", "new_full")) else None
    if isinstance(dtype, Dtype):
        made = Made.LITERAL if dtype.literal else Made.FOLLOWS
        lowered = node if positional and dtype.word in ("bf16", "fp16") else None
        return Tensor(
            dtype.word,
            made,
            f"made by `{text}` (line {node.lineno})",
            node,
            zero_dim,
            positional,
            lowered,
            buffer,
            on_cpu,
            frequency,
        )
    if dtype is not None and not (isinstance(dtype, Scalar) and dtype.value is None):
        return Tensor(None, node=node, zero_dim=zero_dim, positional=positional)
    if name in names.LIKE or name in names.NEW:
        like = args[0] if args else UNFOLLOWED
        if not isinstance(like, Tensor):
            return UNFOLLOWED
        return Tensor(
            like.dtype,
            Made.FOLLOWS,
            f"made by `{text}` (line {node.lineno})",
            node,
            like.zero_dim if name in names.LIKE else False,
            buffer=buffer,
        )
    if name == "arange":
        floats = [a for a in args if isinstance(a, Scalar) and isinstance(a.value, float)]
        doubtful = [a for a in args if not (isinstance(a, Scalar))]
        word = None if doubtful else ("fp32" if floats else "int64")
        return Tensor(
            word, Made.DEFAULT, f"made by `{text}` (line {node.lineno})", node, False, positional, on_cpu=on_cpu, frequency=frequency
        )
    if name == "full":
        fill = args[1] if len(args) > 1 else kwargs.get("fill_value", UNKNOWN)
        if isinstance(fill, Tensor):
            return Tensor(fill.dtype, Made.FOLLOWS, node=node, zero_dim=zero_dim)
        value = fill.value if isinstance(fill, Scalar) else UNKNOWN
        if isinstance(value, (bool, int)):
            return Tensor("bool" if isinstance(value, bool) else "int64", Made.DEFAULT, node=node)
        if value is UNKNOWN and not _is_float_text(node):
            return Tensor(None, node=node, zero_dim=zero_dim)
    if name in ("tensor", "as_tensor", "scalar_tensor"):
        data = args[0] if args else UNKNOWN
        if not (isinstance(data, Scalar) and isinstance(data.value, float)):
            return Tensor(None, node=node, zero_dim=zero_dim)
    return Tensor(
        "fp32", Made.DEFAULT, f"made by `{text}` without dtype (line {node.lineno})", node, zero_dim, buffer=buffer, on_cpu=on_cpu
    )


# arange over these numbers the features of a table, and not the positions: exact in bf16 and another matter; `seq_dim` is an axis of those
_COUNTS_FEATURES = re.compile(r"(?<!seq_)(?<!time_)dim|feat|channel|half|embed|freq")


def _is_float_text(node: ast.Call) -> bool:
    """full(..., float("-inf")), full(..., torch.finfo(dtype).min), full(..., dim**-0.5), full(..., 1 / n): certainly floating."""
    fill = node.args[1] if len(node.args) > 1 else next((k.value for k in node.keywords if k.arg == "fill_value"), None)
    return fill is not None and _is_float(fill)


def _is_float(node: ast.expr) -> bool:
    """Whether a number is certainly no integer, as it is written."""
    if isinstance(node, ast.UnaryOp):
        return _is_float(node.operand)
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Pow):  # a negative power of an integer is a float as well
            return _is_float(node.left) or _is_float(node.right) or isinstance(node.right, ast.UnaryOp)
        return isinstance(node.op, ast.Div) or _is_float(node.left) or _is_float(node.right)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, float)
    return any(word in ast.unparse(node) for word in _FLOATS)


_FLOATS = ("float(", "finfo(", "math.inf", "torch.inf", "np.inf", "math.sqrt", "math.log", "math.exp")
