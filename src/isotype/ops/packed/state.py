"""`PackedState`: what a packed weight is beside its bytes, and how it is widened.

A weight is widened in pieces of rows, so that its fp32 values are never there all at once. A piece fits a CPU's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..nf4 import widen_4bit
from . import formats
from .formats import Layout

# elements of a piece
_CPU, _GPU = 1 << 18, 1 << 26


class PackedState:
    """The part of a packed weight that is not its bytes.

    shape    of the weight as a product sees it
    word     `fp8 int8 int4 nvfp4 mxfp4`, as `precision.base` has it
    tensors  scales, zero points and the like, by the file's names
    """

    def __init__(self, layout: Layout, word: str, tensors: dict[str, Tensor]) -> None:
        self.layout, self.word, self.tensors = layout, word, tensors
        self.shape = torch.Size(layout.shape)

    def widen(self, packed: Tensor, dtype: torch.dtype, beside: int = 0) -> Tensor:
        """The weight in `dtype`: computed in fp32 (fp64 for fp64) and narrowed once.

        packed  uint8[...]  the bytes of the file's tensor
        beside  columns that the result has after those of the weight, not written
        ->      dtype[O, K + beside]
        """
        out = torch.empty(self.shape[0], self.shape[1] + beside, dtype=dtype, device=packed.device)
        return out if packed.is_meta else self.widen_rows(packed, slice(0, self.shape[0]), out)

    def widen_rows(self, packed: Tensor, rows: slice, out: Tensor) -> Tensor:
        """Writes these rows, whose first is a multiple of `layout.align`, into the first K columns of `out`."""
        of, columns = self.layout, self.shape[1]
        name, dtype, shape = of.main
        t = {**self.tensors, name: packed.reshape(-1).view(dtype).view(shape)}
        wide = torch.promote_types(torch.float32, out.dtype)
        decode: Callable[..., Tensor] = getattr(formats, of.format)
        most = _CPU if packed.is_cpu else _GPU
        step = max(1, most // (columns * of.align)) * of.align
        for start in range(rows.start, rows.stop, step):
            piece = slice(start, min(start + step, rows.stop))
            out[piece.start - rows.start : piece.stop - rows.start, :columns] = decode(t, piece, wide, of)
        return out

    def mapped(self, make: Callable[[Tensor], Tensor]) -> PackedState:
        """The same with each tensor as `make` gives it."""
        return PackedState(self.layout, self.word, {name: make(tensor) for name, tensor in self.tensors.items()})

    def moved(self, device: torch.device) -> PackedState:
        """On this device, in the same dtypes: nothing casts a scale."""
        if all(tensor.device == device for tensor in self.tensors.values()):
            return self
        return self.mapped(lambda tensor: tensor.to(device))


def widen(packed: Tensor, state: Any, dtype: torch.dtype, beside: int = 0) -> Tensor:
    """A packed weight in `dtype`, with `beside` unwritten columns after its own.

    state  a `PackedState`, or bitsandbytes' QuantState of 4 bits
    """
    if isinstance(state, PackedState):
        return state.widen(packed, dtype, beside)
    return widen_4bit(packed, state, dtype, beside=beside)


def word_of_state(state: Any) -> str:
    """`nf4`, `fp8` and so on."""
    return str(state.word if isinstance(state, PackedState) else state.quant_type)
