"""Rotates q and k in one kernel launch. Each Triton program rotates a tile of heads of q or k at
one position of one sequence. These heads use the same row of the tables.

B is the batch size, N the number of query heads, M the number of key heads, S the number of
positions, and D the head size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..backend import empty_rows_like
from ..launch import on_tensor_device

# pairs per program: 16 per thread with 4 warps, which are two loads of 16 bytes in bf16 for each
# half
MAX_PAIRS = 2048


@triton.jit
def rotate_tile(
    x,
    out,
    x_start,
    out_start,
    x_head_stride,
    out_head_stride,
    tile,
    heads,
    size,
    pairs,
    cos_fp32,
    sin_fp32,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROTATED: tl.constexpr,
):
    """Rotates HEADS heads at one position. Reads the heads from x and writes the results to out.
    The tensors cos and sin have the shape [1, BLOCK].
    """
    head = tile.to(tl.int64) * HEADS + tl.arange(0, HEADS)
    in_heads = (head < heads)[:, None]
    r = tl.arange(0, BLOCK)
    source = x + x_start + head[:, None] * x_head_stride
    target = out + out_start + head[:, None] * out_head_stride
    if INTERLEAVED:
        # the two values of a pair are neighbours. All pairs are loaded and stored as one contiguous
        # run, so that a load is 16 bytes wide and not 2
        pair_index = tl.arange(0, 2 * BLOCK)[None, :]
        is_rotated = in_heads & (pair_index < 2 * pairs)
        x_fp32 = tl.load(source + pair_index, mask=is_rotated, other=0.0).to(
            tl.float32
        )  # [HEADS, 2 BLOCK]
        a_fp32, b_fp32 = tl.split(tl.reshape(x_fp32, (HEADS, BLOCK, 2)))
        y_fp32 = tl.join(
            a_fp32 * cos_fp32 - b_fp32 * sin_fp32, b_fp32 * cos_fp32 + a_fp32 * sin_fp32
        )
        tl.store(
            target + pair_index,
            tl.reshape(y_fp32, (HEADS, 2 * BLOCK)).to(out.dtype.element_ty),
            mask=is_rotated,
        )
    else:
        is_rotated = in_heads & (r < pairs)[None, :]
        a_fp32 = tl.load(source + r[None, :], mask=is_rotated, other=0.0).to(
            tl.float32
        )  # [HEADS, BLOCK]
        b_fp32 = tl.load(source + pairs + r[None, :], mask=is_rotated, other=0.0).to(
            tl.float32
        )  # [HEADS, BLOCK]
        tl.store(
            target + r[None, :],
            (a_fp32 * cos_fp32 - b_fp32 * sin_fp32).to(out.dtype.element_ty),
            mask=is_rotated,
        )
        tl.store(
            target + pairs + r[None, :],
            (b_fp32 * cos_fp32 + a_fp32 * sin_fp32).to(out.dtype.element_ty),
            mask=is_rotated,
        )
    if UNROTATED:
        # the dimensions that are not rotated are copied
        d = (2 * pairs + tl.arange(0, UNROTATED))[None, :]
        is_unrotated = in_heads & (d < size)
        tl.store(target + d, tl.load(source + d, mask=is_unrotated, other=0.0), mask=is_unrotated)


@triton.jit
def rotate_kernel(
    q,
    k,
    q_out,
    k_out,
    cos,
    sin,
    q_batch_stride,
    q_head_stride,
    q_position_stride,
    k_batch_stride,
    k_head_stride,
    k_position_stride,
    q_out_batch_stride,
    q_out_head_stride,
    q_out_position_stride,
    k_out_batch_stride,
    k_out_head_stride,
    k_out_position_stride,
    q_heads,
    k_heads,
    q_tiles,
    positions,
    size,
    pairs,
    cos_batch_stride,
    cos_position_stride,
    cos_pair_stride,
    sin_batch_stride,
    sin_position_stride,
    sin_pair_stride,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROTATED: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    batch, position = index // positions, index % positions
    tile = tl.program_id(1)
    r = tl.arange(0, BLOCK)
    cos_pointers = (
        cos + batch * cos_batch_stride + position * cos_position_stride + r * cos_pair_stride
    )
    sin_pointers = (
        sin + batch * sin_batch_stride + position * sin_position_stride + r * sin_pair_stride
    )
    cos_fp32 = tl.load(cos_pointers, mask=r < pairs, other=1.0).to(tl.float32)[
        None, :
    ]  # [1, BLOCK]
    sin_fp32 = tl.load(sin_pointers, mask=r < pairs, other=0.0).to(tl.float32)[
        None, :
    ]  # [1, BLOCK]
    if INVERSE:
        sin_fp32 = -sin_fp32
    if tile < q_tiles:
        start, out_start = (
            batch * q_batch_stride + position * q_position_stride,
            batch * q_out_batch_stride + position * q_out_position_stride,
        )
        rotate_tile(
            q,
            q_out,
            start,
            out_start,
            q_head_stride,
            q_out_head_stride,
            tile,
            q_heads,
            size,
            pairs,
            cos_fp32,
            sin_fp32,
            INTERLEAVED,
            HEADS,
            BLOCK,
            UNROTATED,
        )
    else:
        start, out_start = (
            batch * k_batch_stride + position * k_position_stride,
            batch * k_out_batch_stride + position * k_out_position_stride,
        )
        rotate_tile(
            k,
            k_out,
            start,
            out_start,
            k_head_stride,
            k_out_head_stride,
            tile - q_tiles,
            k_heads,
            size,
            pairs,
            cos_fp32,
            sin_fp32,
            INTERLEAVED,
            HEADS,
            BLOCK,
            UNROTATED,
        )


@on_tensor_device
def rotate_query_and_key(
    q_BNSD: Tensor,
    k_BMSD: Tensor,
    cos_BSR: Tensor,
    sin_BSR: Tensor,
    *,
    interleaved: bool,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    """Rotates q and k in one kernel launch. The tables may have any strides and are not copied."""
    q_out, k_out = empty_rows_like(q_BNSD), empty_rows_like(k_BMSD)
    q_BNSD, k_BMSD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BNSD, k_BMSD))
    batch, q_heads, positions, size = q_BNSD.shape
    k_heads, pairs = k_BMSD.shape[1], cos_BSR.shape[-1]
    if not batch * positions * size * (q_heads + k_heads):
        return q_out, k_out
    block, unrotated = triton.next_power_of_2(max(1, pairs)), size - 2 * pairs
    heads_per_tile = min(triton.next_power_of_2(max(q_heads, k_heads)), max(1, MAX_PAIRS // block))
    q_tiles, k_tiles = triton.cdiv(q_heads, heads_per_tile), triton.cdiv(k_heads, heads_per_tile)
    tables = [
        stride
        for t in (cos_BSR, sin_BSR)
        for stride in (0 if t.shape[0] == 1 else t.stride(0), t.stride(1), t.stride(2))
    ]
    rotate_kernel[(batch * positions, q_tiles + k_tiles)](
        q_BNSD,
        k_BMSD,
        q_out,
        k_out,
        cos_BSR,
        sin_BSR,
        *(stride for t in (q_BNSD, k_BMSD, q_out, k_out) for stride in t.stride()[:3]),
        q_heads,
        k_heads,
        q_tiles,
        positions,
        size,
        pairs,
        *tables,
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        HEADS=heads_per_tile,
        BLOCK=block,
        UNROTATED=triton.next_power_of_2(unrotated) if unrotated else 0,
        num_warps=max(1, min(4, heads_per_tile * block // 512)),
    )
    return q_out, k_out
