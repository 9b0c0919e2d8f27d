"""A 4-bit weight to a float dtype in one launch: packed values, their scales, and the scales' own quantisation.

bitsandbytes needs three launches: the scales to fp32, their offset, the weight. Bytes moved for n elements: n / 2 packed, n / 64 of scales
and, in bf16, 2 n written. The tables (16 and 256 values) stay in the first-level cache. A thread makes 21 loads for 8 packed bytes: one of
them, 16 of their values, and 4 for the scale that they share.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..launch import on_its_device

# Packed bytes of a program: 8 a thread at 4 warps, which store 16 values each, 32 bytes in bf16
BLOCK = 1024


@triton.jit
def widen_4bit_kernel(
    packed, absmax, code, inner_absmax, inner_code, offset, out, size,
    SCALED: tl.constexpr, INNER: tl.constexpr, NESTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    # a thread has 8 bytes, which share a scale (SCALED is a multiple of 8): it is decoded once for them
    run = tl.arange(0, BLOCK // 8) * 8
    i = run[:, None] + tl.arange(0, 8)[None, :]
    left = tl.minimum(size - first, BLOCK).to(tl.int32)
    byte = tl.load(packed + first + i, mask=i < left, other=0).to(tl.int32)  # [BLOCK / 8, 8]
    inside = run < left
    scale = (first + run) // SCALED
    if NESTED:
        q = tl.load(absmax + scale, mask=inside, other=0).to(tl.int32)
        inner_fp32 = tl.load(inner_absmax + scale // INNER, mask=inside, other=0.0).to(tl.float32)
        scale_fp32 = tl.load(inner_code + q).to(tl.float32) * inner_fp32 + tl.load(offset).to(tl.float32)  # [BLOCK / 8]
    else:
        scale_fp32 = tl.load(absmax + scale, mask=inside, other=0.0).to(tl.float32)  # [BLOCK / 8]
    scale_fp32 = scale_fp32[:, None]
    # a byte's high half comes first
    high_fp32 = tl.load(code + (byte >> 4)).to(tl.float32) * scale_fp32  # [BLOCK / 8, 8]
    low_fp32 = tl.load(code + (byte & 15)).to(tl.float32) * scale_fp32  # [BLOCK / 8, 8]
    both = tl.arange(0, 2 * BLOCK)
    values_fp32 = tl.reshape(tl.join(high_fp32, low_fp32), (2 * BLOCK,))
    tl.store(out + 2 * first + both, values_fp32.to(out.dtype.element_ty), mask=both < 2 * left)


@on_its_device
def widen_4bit(
    packed: Tensor,
    absmax: Tensor,
    code: Tensor,
    inner_absmax: Tensor | None,
    inner_code: Tensor | None,
    offset: Tensor | None,
    blocksize: int,
    inner_blocksize: int,
    out: Tensor,
) -> None:
    """Writes `out`, contiguous, of an even number of elements. See `op.widen_4bit`."""
    nested = inner_absmax is not None
    size = out.numel() // 2
    if size:
        widen_4bit_kernel[(triton.cdiv(size, BLOCK),)](
            packed, absmax, code, inner_absmax if nested else absmax, inner_code if nested else absmax, offset if nested else absmax, out,
            size, SCALED=blocksize // 2, INNER=inner_blocksize, NESTED=nested, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
