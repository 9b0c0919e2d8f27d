"""The rotation: one program a (batch, position) and a tile of heads, which share a row of the tables. N heads, S positions, D head size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import on_its_device

# Pairs a program has at most: 16 a thread at 4 warps, which is two loads of 16 bytes in bf16 for each half
TILE = 2048


@triton.jit
def rotate_kernel(
    x, cos, sin, out,
    x_batch, x_head, x_position, out_batch, out_head, out_position, heads, positions, size, pairs, table_batch,
    INTERLEAVED: tl.constexpr, BACK: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    batch, position = index // positions, index % positions
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    here = (head < heads)[:, None]
    r = tl.arange(0, BLOCK)
    table = batch * table_batch + position * pairs + r
    cos_fp32 = tl.load(cos + table, mask=r < pairs, other=1.0).to(tl.float32)[None, :]  # [1, BLOCK]
    sin_fp32 = tl.load(sin + table, mask=r < pairs, other=0.0).to(tl.float32)[None, :]  # [1, BLOCK]
    if BACK:
        sin_fp32 = -sin_fp32
    source = x + batch * x_batch + position * x_position + head[:, None] * x_head
    target = out + batch * out_batch + position * out_position + head[:, None] * out_head
    if INTERLEAVED:
        # a pair's two values are neighbours: loaded and stored as one run, so that a load is 16 bytes wide and not 2
        both = tl.arange(0, 2 * BLOCK)[None, :]
        turned = here & (both < 2 * pairs)
        x_fp32 = tl.load(source + both, mask=turned, other=0.0).to(tl.float32)  # [HEADS, 2 BLOCK]
        a_fp32, b_fp32 = tl.split(tl.reshape(x_fp32, (HEADS, BLOCK, 2)))
        y_fp32 = tl.join(a_fp32 * cos_fp32 - b_fp32 * sin_fp32, b_fp32 * cos_fp32 + a_fp32 * sin_fp32)
        tl.store(target + both, tl.reshape(y_fp32, (HEADS, 2 * BLOCK)).to(out.dtype.element_ty), mask=turned)
    else:
        turned = here & (r < pairs)[None, :]
        a_fp32 = tl.load(source + r[None, :], mask=turned, other=0.0).to(tl.float32)  # [HEADS, BLOCK]
        b_fp32 = tl.load(source + pairs + r[None, :], mask=turned, other=0.0).to(tl.float32)  # [HEADS, BLOCK]
        tl.store(target + r[None, :], (a_fp32 * cos_fp32 - b_fp32 * sin_fp32).to(out.dtype.element_ty), mask=turned)
        tl.store(target + pairs + r[None, :], (b_fp32 * cos_fp32 + a_fp32 * sin_fp32).to(out.dtype.element_ty), mask=turned)
    if REST:
        # what is not rotated passes through
        d = (2 * pairs + tl.arange(0, REST))[None, :]
        passing = here & (d < size)
        tl.store(target + d, tl.load(source + d, mask=passing, other=0.0), mask=passing)


def _like(x_BNSD: Tensor) -> Tensor:
    """In the order of x in memory: a projection's [B S N D], seen as [B N S D], needs no copy on its way back."""
    y_BNSD = torch.empty_like(x_BNSD)
    return y_BNSD if y_BNSD.stride(-1) == 1 else torch.empty_like(x_BNSD, memory_format=torch.contiguous_format)


@on_its_device
def rotate(x_BNSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, *, interleaved: bool, back: bool) -> Tensor:
    out = _like(x_BNSD)
    if not out.numel():
        return out
    if x_BNSD.stride(-1) != 1:
        x_BNSD = x_BNSD.contiguous()
    cos_BSR, sin_BSR = cos_BSR.contiguous(), sin_BSR.contiguous()
    batch, heads, positions, size = x_BNSD.shape
    pairs = cos_BSR.shape[-1]
    block, rest = triton.next_power_of_2(max(1, pairs)), size - 2 * pairs
    heads_each = min(triton.next_power_of_2(heads), max(1, TILE // block))
    rotate_kernel[(batch * positions, triton.cdiv(heads, heads_each))](
        x_BNSD, cos_BSR, sin_BSR, out, *x_BNSD.stride()[:3], *out.stride()[:3], heads, positions, size, pairs,
        0 if cos_BSR.shape[0] == 1 else positions * pairs,
        INTERLEAVED=interleaved, BACK=back, HEADS=heads_each, BLOCK=block, REST=triton.next_power_of_2(rest) if rest else 0,
        num_warps=max(1, min(4, heads_each * block // 512)),
    )  # fmt: skip
    return out
