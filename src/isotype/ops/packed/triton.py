"""Triton kernels that dequantise a packed weight in one launch. On a CPU, the C++ kernels in
`cpu.cpp` do this.

For n elements, a kernel reads n or n / 2 packed bytes and their scales, and writes 2 n bytes in
bf16. One Triton program reads only scales that are close together in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..launch import on_tensor_device
from .formats import FOUR_BIT_KINDS, KINDS

BLOCK = 1024  # number of packed bytes that a program reads, all in one row
_E4M3, _E5M2, _INT8, _FP4 = (KINDS[kind] for kind in ("e4m3", "e5m2", "int8", "fp4"))


@triton.jit
def decode_small_float(
    magnitude, sign, MANTISSA: tl.constexpr, BIAS: tl.constexpr, UNIT: tl.constexpr
):
    """Converts a number in a 4-bit or 8-bit float format to fp32. A subnormal number is an integer
    times UNIT. For a normal number, BIAS is added to the exponent, and the bits are moved to their
    positions in an fp32 number.
    """
    subnormal_bits = (magnitude.to(tl.float32) * UNIT).to(tl.int32, bitcast=True)
    bits = tl.where(
        (magnitude >> MANTISSA) > 0, (magnitude << (23 - MANTISSA)) + (BIAS << 23), subnormal_bits
    )
    return (bits | (sign << 31)).to(tl.float32, bitcast=True)


@triton.jit
def decode(
    q,
    KIND: tl.constexpr,
    E4M3: tl.constexpr,
    E5M2: tl.constexpr,
    INT8: tl.constexpr,
    FP4: tl.constexpr,
):
    """Converts numbers from their bits in int32 to fp32."""
    if KIND == E4M3:
        value_fp32 = decode_small_float(q & 0x7F, q >> 7, 3, 120, 0.001953125)
    elif KIND == E5M2:
        value_fp32 = decode_small_float(q & 0x7F, q >> 7, 2, 112, 1.52587890625e-05)
    elif KIND == FP4:
        value_fp32 = decode_small_float(q & 7, q >> 3, 1, 126, 0.5)
    elif KIND == INT8:
        value_fp32 = ((q << 24) >> 24).to(tl.float32)
    else:
        value_fp32 = (q - 8).to(tl.float32)
    return value_fp32


@triton.jit
def widen_kernel(
    out,
    packed,
    scale,
    zero,
    columns,
    groups,
    packed_stride,
    out_stride,
    first,
    height,
    width,
    KIND: tl.constexpr,
    IS_4BIT: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
    E4M3: tl.constexpr,
    E5M2: tl.constexpr,
    INT8: tl.constexpr,
    FP4: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    block = ((first + row) // height - first // height) * groups
    i = start + tl.arange(0, BLOCK)
    if IS_4BIT:
        byte = tl.load(packed + row * packed_stride + i, mask=2 * i < columns, other=0).to(
            tl.int32
        )  # [BLOCK]
        low_fp32 = decode(byte & 15, KIND, E4M3, E5M2, INT8, FP4)
        high_fp32 = decode(byte >> 4, KIND, E4M3, E5M2, INT8, FP4)
        group = block + 2 * i // width
        inside = 2 * i < columns
    else:
        byte = tl.load(packed + row * packed_stride + i, mask=i < columns, other=0).to(
            tl.int32
        )  # [BLOCK]
        low_fp32 = decode(byte, KIND, E4M3, E5M2, INT8, FP4)
        high_fp32 = low_fp32
        group = block + i // width
        inside = i < columns
    scale_fp32 = tl.load(scale + group, mask=inside, other=0.0)  # [BLOCK]
    if ZERO:
        zero_fp32 = tl.load(zero + group, mask=inside, other=0.0)  # [BLOCK]
        low_fp32 -= zero_fp32
        high_fp32 -= zero_fp32
    if IS_4BIT:
        values_fp32 = tl.interleave(low_fp32 * scale_fp32, high_fp32 * scale_fp32)  # [2 BLOCK]
        j = 2 * start + tl.arange(0, 2 * BLOCK)
        tl.store(out + row * out_stride + j, values_fp32.to(out.dtype.element_ty), mask=j < columns)
    else:
        tl.store(
            out + row * out_stride + i,
            (low_fp32 * scale_fp32).to(out.dtype.element_ty),
            mask=inside,
        )


@on_tensor_device
def widen_(
    out: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    kind: int,
    first: int,
    height: int,
    width: int,
) -> None:
    """Dequantises the weight into `out`, whose columns are adjacent in memory. `state.BlockScaled`
    describes the tensors.
    """
    rows, columns = out.shape
    is_4bit = kind in [KINDS[name] for name in FOUR_BIT_KINDS]
    if out.numel():
        widen_kernel[(rows, triton.cdiv(columns, 2 * BLOCK if is_4bit else BLOCK))](
            out,
            packed,
            scale,
            scale if zero is None else zero,
            columns,
            scale.shape[-1],
            packed.stride(0),
            out.stride(0),
            first,
            height,
            width,
            KIND=kind,
            IS_4BIT=is_4bit,
            ZERO=zero is not None,
            BLOCK=BLOCK,
            E4M3=_E4M3,
            E5M2=_E5M2,
            INT8=_INT8,
            FP4=_FP4,
        )


# --- bitsandbytes' 4-bit numbers. One launch decodes the numbers, their scales, and the quantised
# scales; bitsandbytes needs three launches. For n elements the kernel reads n / 2 packed bytes and
# n / 64 bytes of scales, and writes 2 n bytes in bf16. The tables (16 and 256 values) stay in the
# L1 cache. A thread makes 21 loads for 8 packed bytes: one for the bytes, 16 for their values, and
# 4 for their scale


@triton.jit
def widen_4bit_kernel(
    packed,
    absmax,
    code,
    inner_absmax,
    inner_code,
    offset,
    out,
    size,
    BYTES_PER_SCALE: tl.constexpr,
    SCALES_PER_BLOCK: tl.constexpr,
    NESTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    # the 8 bytes of a thread share one scale, since BYTES_PER_SCALE is a multiple of 8; the scale
    # is decoded once
    first_byte = tl.arange(0, BLOCK // 8) * 8
    i = first_byte[:, None] + tl.arange(0, 8)[None, :]
    count = tl.minimum(size - first, BLOCK).to(tl.int32)
    byte = tl.load(packed + first + i, mask=i < count, other=0).to(tl.int32)  # [BLOCK / 8, 8]
    inside = first_byte < count
    scale = (first + first_byte) // BYTES_PER_SCALE
    if NESTED:
        q = tl.load(absmax + scale, mask=inside, other=0).to(tl.int32)
        inner_fp32 = tl.load(inner_absmax + scale // SCALES_PER_BLOCK, mask=inside, other=0.0).to(
            tl.float32
        )
        scale_fp32 = tl.load(inner_code + q).to(tl.float32) * inner_fp32 + tl.load(offset).to(
            tl.float32
        )  # [BLOCK / 8]
    else:
        scale_fp32 = tl.load(absmax + scale, mask=inside, other=0.0).to(tl.float32)  # [BLOCK / 8]
    scale_fp32 = scale_fp32[:, None]
    # the first number of a byte is in its high half
    high_fp32 = tl.load(code + (byte >> 4)).to(tl.float32) * scale_fp32  # [BLOCK / 8, 8]
    low_fp32 = tl.load(code + (byte & 15)).to(tl.float32) * scale_fp32  # [BLOCK / 8, 8]
    pair_index = tl.arange(0, 2 * BLOCK)
    values_fp32 = tl.reshape(tl.join(high_fp32, low_fp32), (2 * BLOCK,))
    tl.store(
        out + 2 * first + pair_index,
        values_fp32.to(out.dtype.element_ty),
        mask=pair_index < 2 * count,
    )


@on_tensor_device
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
    """Dequantises the weight into `out`, which must be contiguous and have an even number of
    elements. `state.dequantise_4bit` describes the tensors.
    """
    nested = inner_absmax is not None
    size = out.numel() // 2
    if size:
        widen_4bit_kernel[(triton.cdiv(size, BLOCK),)](
            packed,
            absmax,
            code,
            inner_absmax if nested else absmax,
            inner_code if nested else absmax,
            offset if nested else absmax,
            out,
            size,
            BYTES_PER_SCALE=blocksize // 2,
            SCALES_PER_BLOCK=inner_blocksize,
            NESTED=nested,
            BLOCK=BLOCK,
            num_warps=4,
        )
