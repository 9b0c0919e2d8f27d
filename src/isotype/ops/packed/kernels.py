"""One kernel for the formats whose numbers lie in order along a row, each of a block with one scale: fp8, int8, int4 in rows, nvfp4, mxfp4.

GPTQ's and AWQ's words run down the columns; `repack` puts them in rows when a layer is loaded. Act-order's columns have no order: those are
widened by `formats`, as is everything in fp64.
The values are those of `formats` bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..backend import cpp_runs, fused_runs
from ..cpp import CppKernels
from ..library import library_op
from .formats import KINDS, Layout, Tensors, exponents, packed_zeros

KERNELS = CppKernels(__file__, in_graphs=True, widen="dppppiiiiiiii")
_FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}


class Ordered(NamedTuple):
    """(number - zero) * scale. packed: uint8[rows bytes]; scale, zero: fp32[blocks groups], from the block of the first row on."""

    kind: str
    packed: Tensor
    scale: Tensor
    zero: Tensor | None


def ordered(t: Tensors, rows: slice, of: Layout) -> Ordered | None:
    """These rows of a weight in that form; None for a format that is not of it. Arguments are those of `formats`."""
    height = of.block[0]
    blocks = slice(rows.start // height, -(-rows.stop // height))

    def own(name: str) -> Tensor:
        values = t[name][blocks]
        return (exponents(values, torch.float32) if of.powers and name == "weight_scale" else values.float()).contiguous()

    if of.format == "scaled":
        zero = own("weight_zero_point") if "weight_zero_point" in t else None
        return Ordered(_FP8[t["weight"].dtype], t["weight"][rows].view(torch.uint8), own("weight_scale"), zero)
    if of.format == "int8_rows":
        return Ordered("int8", t["weight"][rows].view(torch.uint8), t["SCB"][rows, None].float() / 127, None)
    if of.shape[1] % 2 or of.block[1] % 2:
        return None
    if of.format == "packed_rows" and "weight_g_idx" not in t:
        packed = t["weight_packed"][rows].view(torch.uint8)
        zero = packed_zeros(t, rows, of).float() if "weight_zero_point" in t else None
        # numbers of 8 bits are stored with an offset of 128: those of int8 with the other highest bit
        return Ordered("int4" if of.bits == 4 else "int8", packed if of.bits == 4 else packed ^ 128, own("weight_scale"), zero)
    if of.format == "nvfp4":
        whole = t["weight_scale_2"].float() if "weight_scale_2" in t else 1 / t["weight_global_scale"].float()
        packed = t["weight"] if "weight" in t else t["weight_packed"]
        return Ordered("fp4", packed[rows], own("weight_scale") * whole, None)
    if of.format == "mxfp4":
        return Ordered("fp4", t["weight_packed"][rows], exponents(t["weight_scale"][rows], torch.float32), None)
    return None


@library_op(
    "widen_packed_(Tensor(a!) out, Tensor packed, Tensor scale, Tensor? zero, int kind, int first, int height, int width) -> ()",
    fake=lambda *_: None,
)
def _widen_(out: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, kind: int, first: int, height: int, width: int) -> None:
    rows, columns = out.shape
    packed = packed if packed.stride(-1) == 1 else packed.contiguous()
    if cpp_runs(KERNELS, out):
        strides = packed.stride(0), out.stride(0)
        KERNELS("widen", out.dtype, packed, scale, zero, out, rows, columns, *strides, kind, first, height, width)
    else:
        from . import triton

        triton.widen_(out, packed, scale, zero, kind, first, height, width)


def widen_rows(t: Tensors, rows: slice, of: Layout, out: Tensor) -> bool:
    """Writes these rows into the first K columns of `out`, whose columns are adjacent; False where no kernel does it."""
    if not (cpp_runs(KERNELS, out) or fused_runs(out)):
        return False
    made = ordered(t, rows, of)
    if made is not None:
        _widen_(out[:, : of.shape[1]], made.packed, made.scale, made.zero, KINDS[made.kind], rows.start, *of.block)
    return made is not None
