"""`PackedState`: what a packed weight is beside its bytes, and how it is widened.

A weight is widened in pieces of rows, so that its fp32 values are never there all at once. A piece fits a CPU's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..nf4 import widen_4bit
from . import formats, kernels
from .formats import Layout

_CPU, _GPU = 1 << 18, 1 << 26


def piece_of(tensor: Tensor) -> int:
    """Elements that are widened or put in order at once, where this tensor is."""
    return _CPU if tensor.is_cpu else _GPU


class PackedState:
    """The part of a packed weight that is not its bytes.

    shape    of the weight as a product sees it
    word     `fp8 int8 int4 nvfp4 mxfp4 gguf`, as `precision.base` has it
    tensors  scales, zero points and the like, by the file's names
    """

    def __init__(self, layout: Layout, word: str, tensors: dict[str, Tensor]) -> None:
        self.layout, self.word, self.tensors = layout, word, tensors
        self.shape = torch.Size(layout.shape)

    def widen(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`: computed in fp32 (fp64 for fp64) and narrowed once.

        packed  uint8[...]  the bytes of the file's tensor
        ->      dtype[O, K]
        """
        out = torch.empty(self.shape, dtype=dtype, device=packed.device)
        return out if packed.is_meta else self.widen_rows(packed, slice(0, self.shape[0]), out)

    def widen_rows(self, packed: Tensor, rows: slice, out: Tensor) -> Tensor:
        """Writes these rows, whose first is a multiple of `layout.align`, into `out`."""
        of, columns = self.layout, self.shape[1]
        name, dtype, shape = of.main
        t = {**self.tensors, name: packed.reshape(-1).view(dtype).view(shape)}
        if kernels.widen_rows(t, rows, of, out):
            return out
        wide = torch.promote_types(torch.float32, out.dtype)
        decode: Callable[..., Tensor] = getattr(formats, of.format)
        step = max(1, piece_of(packed) // (columns * of.align)) * of.align
        for start in range(rows.start, rows.stop, step):
            piece = slice(start, min(start + step, rows.stop))
            out[piece.start - rows.start : piece.stop - rows.start] = decode(t, piece, wide, of)
        return out

    def mapped(self, make: Callable[[Tensor], Tensor]) -> PackedState:
        """The same with each tensor as `make` gives it."""
        return PackedState(self.layout, self.word, {name: make(tensor) for name, tensor in self.tensors.items()})

    def moved(self, device: torch.device) -> PackedState:
        """On this device, in the same dtypes: nothing casts a scale."""
        if all(tensor.device == device for tensor in self.tensors.values()):
            return self
        return self.mapped(lambda tensor: tensor.to(device))


class StackState(PackedState):
    """The same of the matrices of every expert of a mixture, of which a few are widened at a time.

    layout      of one piece [O K] of one expert: its matrix, or gate and up, which lie one below the other
    tensors     [E pieces ...]
    experts     E
    pieces      of one expert
    transposed  whether the model's code has a matrix as [K O]
    """

    def __init__(
        self, layout: Layout, word: str, tensors: dict[str, Tensor], *, experts: int, pieces: int, transposed: bool
    ) -> None:  # fmt: skip
        super().__init__(layout, word, tensors)
        self.experts, self.pieces, self.transposed = experts, pieces, transposed
        rows, columns = self.pieces * layout.shape[0], layout.shape[1]
        self.shape = torch.Size((self.experts, columns, rows) if transposed else (self.experts, rows, columns))

    def widen(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Every expert's matrix, as the model's code has them: dtype[E O K], or dtype[E K O]."""
        wide = self.widen_experts(packed, slice(0, self.experts), dtype)
        return wide.transpose(1, 2) if self.transposed else wide

    def widen_experts(self, packed: Tensor, experts: slice, dtype: torch.dtype) -> Tensor:
        """The matrices of some experts: dtype[E O K] for both layouts."""
        rows, columns = self.layout.shape
        out = torch.empty(experts.stop - experts.start, self.pieces * rows, columns, dtype=dtype, device=packed.device)
        pieces = packed.view(self.experts, self.pieces, -1)
        for expert in range(experts.start, experts.start if packed.is_meta else experts.stop):
            for piece in range(self.pieces):
                one = PackedState(self.layout, self.word, {name: tensor[expert, piece] for name, tensor in self.tensors.items()})
                own = out[expert - experts.start, piece * rows : (piece + 1) * rows]
                one.widen_rows(pieces[expert, piece], slice(0, rows), own)
        return out

    def mapped(self, make: Callable[[Tensor], Tensor]) -> StackState:
        tensors = {name: make(tensor) for name, tensor in self.tensors.items()}
        how = {"experts": self.experts, "pieces": self.pieces}
        return StackState(self.layout, self.word, tensors, transposed=self.transposed, **how)


def widen(packed: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    """A packed weight in `dtype`.

    state  a `PackedState`, or bitsandbytes' QuantState of 4 bits
    """
    if isinstance(state, PackedState):
        return state.widen(packed, dtype)
    return widen_4bit(packed, state, dtype)


def quantised(weight: Tensor, word: str) -> tuple[Tensor, PackedState]:
    """A float weight [O K] packed as `fp8` or `int8` with a fp32 scale a row: (its bytes, its state).

    The largest magnitude of a row becomes the largest number of the format.
    """
    rows, columns = weight.shape
    dtype, largest = (torch.float8_e4m3fn, 448.0) if word == "fp8" else (torch.int8, 127.0)
    packed, scale = torch.empty(rows, columns, dtype=dtype, device=weight.device), weight.new_empty(rows, 1, dtype=torch.float32)
    step = rows if weight.is_meta else max(1, piece_of(weight) // columns)
    for start in range(0, rows, step):
        piece = slice(start, start + step)
        values = weight[piece].float()
        most = values.abs().amax(1, keepdim=True)
        scale[piece] = torch.where(most > 0, most / largest, 1.0)
        values = (values / scale[piece]).clamp_(-largest, largest)
        packed[piece] = values.to(dtype) if word == "fp8" else values.round_().to(dtype)
    layout = Layout("scaled", (rows, columns), ("weight", dtype, (rows, columns)), (1, columns))
    return packed, PackedState(layout, word, {"weight_scale": scale})
