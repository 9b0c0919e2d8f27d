"""What an op was given, described: dtype, shape, name, origin chain; and which of the operands is the odd one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...dtypes import name as dtype_name
from .context import Context
from .origin import Origin

# ops that write one operand into another: the first is the destination, and its dtype rules
WRITES = {"index_put", "_index_put_impl", "scatter", "scatter_add", "index_copy", "index_add", "masked_scatter", "copy", "index_fill"}
_WIDTH = {torch.float64: 3, torch.float32: 2, torch.float16: 1, torch.bfloat16: 1}


@dataclass(frozen=True, slots=True)
class Operand:
    label: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    origin: Origin
    writer: str = ""
    parameter: str = ""

    @classmethod
    def of(cls, context: Context, label: str, tensor: torch.Tensor) -> Operand:
        origin = context.provenance.get(tensor)
        named = origin.what if origin.kind in ("parameter", "buffer") and not origin.via else ""
        return cls(label, tensor.dtype, tuple(tensor.shape), origin, context.provenance.writer(tensor), named)

    @property
    def word(self) -> str:
        return dtype_name(self.dtype)

    def describe(self) -> str:
        written = f"   last written by {self.writer}" if self.writer else ""
        return f"{self.word}[{' '.join(map(str, self.shape))}]{written}"


def dtypes_of(operands: Sequence[Operand]) -> str:
    """`bf16 and fp32`, in the order met."""
    return " and ".join(dict.fromkeys(operand.word for operand in operands))


def odd_one(operands: Sequence[Operand], census: Counter[torch.dtype], op: str) -> Operand:
    """The operand whose dtype is not what the model is made of; for a write, the source; else the widest."""
    if op.strip("_") in WRITES or op in ("__setitem__", "copy_"):
        strays = [operand for operand in operands[1:] if operand.dtype != operands[0].dtype]
        if strays:
            return strays[0]
    dtypes = {operand.dtype for operand in operands}
    usual = next((dtype for dtype, _ in census.most_common() if dtype in dtypes), None)
    if usual is None:
        usual = min(dtypes, key=lambda d: _WIDTH.get(d, 0))
    strays = [operand for operand in operands if operand.dtype != usual] or list(operands)
    # something decided inside the program explains more than something that came in
    return min(strays, key=lambda operand: operand.origin.decider().kind == "input")


def share_of(census: Counter[torch.dtype]) -> str:
    """`99% of the parameters are bf16`."""
    if not census:
        return ""
    dtype, count = census.most_common(1)[0]
    return f"{100 * count / census.total():.0f}% of the parameters are {dtype_name(dtype)}"
