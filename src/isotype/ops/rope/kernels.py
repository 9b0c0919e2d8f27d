"""The rotation: one program a (batch, position) and head; tables in fp32. N heads, S positions, D head size, R rotated pairs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rotate_kernel(
    x, cos, sin, out,
    x_batch, x_head, x_position, heads, positions, size, pairs, table_batch,
    INTERLEAVED: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    batch, head, position = index // (heads * positions), (index // positions) % heads, index % positions
    r = tl.arange(0, BLOCK)
    turned = r < pairs
    table = batch * table_batch + position * pairs + r
    cos_fp32 = tl.load(cos + table, mask=turned, other=1.0).to(tl.float32)  # [BLOCK]
    sin_fp32 = tl.load(sin + table, mask=turned, other=0.0).to(tl.float32)  # [BLOCK]
    if BACK:
        sin_fp32 = -sin_fp32
    if INTERLEAVED:
        first, second = 2 * r, 2 * r + 1
    else:
        first, second = r, r + pairs
    source = x + batch * x_batch + head * x_head + position * x_position
    target = out + index * size
    a_fp32 = tl.load(source + first, mask=turned, other=0.0).to(tl.float32)  # [BLOCK]
    b_fp32 = tl.load(source + second, mask=turned, other=0.0).to(tl.float32)  # [BLOCK]
    tl.store(target + first, (a_fp32 * cos_fp32 - b_fp32 * sin_fp32).to(out.dtype.element_ty), mask=turned)
    tl.store(target + second, (b_fp32 * cos_fp32 + a_fp32 * sin_fp32).to(out.dtype.element_ty), mask=turned)
    # what is not rotated passes through: D - 2R values, at most 2 blocks of them
    for start in range(2 * pairs, size, BLOCK):
        d = start + r
        tl.store(target + d, tl.load(source + d, mask=d < size, other=0.0), mask=d < size)


def rotate(x_BNSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, *, interleaved: bool, back: bool) -> Tensor:
    if x_BNSD.stride(-1) != 1:
        x_BNSD = x_BNSD.contiguous()
    cos_BSR, sin_BSR = cos_BSR.contiguous(), sin_BSR.contiguous()
    batch, heads, positions, size = x_BNSD.shape
    pairs = cos_BSR.shape[-1]
    out = torch.empty(x_BNSD.shape, dtype=x_BNSD.dtype, device=x_BNSD.device)
    if out.numel():
        rotate_kernel[(batch * heads * positions,)](
            x_BNSD, cos_BSR, sin_BSR, out, x_BNSD.stride(0), x_BNSD.stride(1), x_BNSD.stride(2), heads, positions, size, pairs,
            0 if cos_BSR.shape[0] == 1 else positions * pairs,
            INTERLEAVED=interleaved, BACK=back, BLOCK=triton.next_power_of_2(max(1, pairs)), num_warps=1,
        )  # fmt: skip
    return out
