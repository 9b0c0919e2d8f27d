"""RMSNorm kernels. Each Triton program computes a tile of whole rows. A tile holds several rows if
they are short (for example, the 64 to 256 values of a head). H is the hidden size.

For the weight's gradient, each Triton program sums over several tiles in fp32. A second sum adds
the results of all programs. No kernel uses atomic additions, so the order of additions depends only
on the shapes and the device. These sums are not needed if the weight is frozen, as in LoRA.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import multiprocessors, on_tensor_device, warps

# The smallest number of values of a tile, which is 16 per thread. If a tile were a single row of
# 128 values, each thread would load 2 bytes
MIN_TILE_ELEMENTS = 2048
# Longer rows do not fit into registers: with 32,768 columns the backward spills 20 to 120 values
# per thread
MAX_COLUMNS = 16384
# The number of programs that sum the weight's gradient, for each multiprocessor
PROGRAMS_PER_MULTIPROCESSOR = 4


@triton.jit
def rms_norm_forward_kernel(
    x,
    residual,
    weight,
    out,
    scale,
    total,
    rows,
    hidden,
    eps,
    OFFSET: tl.constexpr,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    h = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (h < hidden)[None, :]
    offsets = row[:, None] * hidden + h[None, :]
    x_fp32 = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    if ADDS:
        # the norm is computed from the sum as stored, after rounding
        sums = (x_fp32 + tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)).to(
            total.dtype.element_ty
        )
        tl.store(total + offsets, sums, mask=inside)
        x_fp32 = sums.to(tl.float32)
    w_fp32 = tl.load(weight + h, mask=h < hidden, other=0.0).to(tl.float32)  # [BLOCK]
    if OFFSET:
        w_fp32 += 1.0
    # torch.compile passes a Python float as fp64
    scale_fp32 = 1.0 / tl.sqrt(tl.sum(x_fp32 * x_fp32, 1) / hidden + eps.to(tl.float32))  # [ROWS]
    tl.store(
        out + offsets,
        (x_fp32 * scale_fp32[:, None] * w_fp32[None, :]).to(out.dtype.element_ty),
        mask=inside,
    )
    tl.store(scale + row, scale_fp32, mask=row < rows)


@triton.jit
def rms_norm_backward_kernel(
    x,
    weight,
    scale,
    dy,
    added_grad,
    dx,
    partial,
    rows,
    hidden,
    tiles_per_program,
    OFFSET: tl.constexpr,
    HAS_ADDED_GRAD: tl.constexpr,
    DWEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    if DWEIGHT:
        dw_fp32 = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(tiles_per_program):
        row = (program * tiles_per_program + tile) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (h < hidden)[None, :]
        offsets = row[:, None] * hidden + h[None, :]
        x_fp32 = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
        d_fp32 = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
        scale_fp32 = tl.load(scale + row, mask=row < rows, other=0.0).to(tl.float32)[
            :, None
        ]  # [ROWS, 1]
        # the weight is loaded again for every tile, from the cache. In registers it would take one
        # register per value (with 16,384 columns 48 values spilled)
        w_fp32 = tl.load(weight + h, mask=h < hidden, other=0.0).to(tl.float32)  # [BLOCK]
        if OFFSET:
            w_fp32 += 1.0
        normed_fp32 = x_fp32 * scale_fp32
        g_fp32 = d_fp32 * w_fp32[None, :]
        mean_fp32 = (tl.sum(g_fp32 * normed_fp32, 1) / hidden)[:, None]  # [ROWS, 1]
        dx_fp32 = scale_fp32 * (g_fp32 - normed_fp32 * mean_fp32)
        if HAS_ADDED_GRAD:
            dx_fp32 += tl.load(added_grad + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + offsets, dx_fp32.to(dx.dtype.element_ty), mask=inside)
        if DWEIGHT:
            dw_fp32 += d_fp32 * normed_fp32
    if DWEIGHT:
        tl.store(partial + program * hidden + h, tl.sum(dw_fp32, 0), mask=h < hidden)


def fits_in_registers(x: Tensor) -> bool:
    """Whether a row of `x` is short enough for these kernels."""
    return x.shape[-1] <= MAX_COLUMNS


def choose_tile(hidden: int) -> tuple[int, int]:
    """Returns (rows, columns) of a tile."""
    block = triton.next_power_of_2(hidden)
    return max(1, MIN_TILE_ELEMENTS // block), block


@on_tensor_device
def rms_norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight_H: Tensor,
    eps: float,
    unit_offset: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns (y, 1 / rms of each row, x + residual or None)."""
    x, weight_H = x.contiguous(), weight_H.contiguous()
    residual = None if residual is None else residual.contiguous()
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    scale = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    total = None if residual is None else torch.empty_like(x)
    if x.numel():
        rows, hidden = scale.numel(), x.shape[-1]
        rows_per_tile, block = choose_tile(hidden)
        rms_norm_forward_kernel[(triton.cdiv(rows, rows_per_tile),)](
            x,
            x if residual is None else residual,
            weight_H,
            out,
            scale,
            x if total is None else total,
            rows,
            hidden,
            eps,
            OFFSET=unit_offset,
            ADDS=residual is not None,
            ROWS=rows_per_tile,
            BLOCK=block,
            num_warps=warps(rows_per_tile * block),
        )
    return out, scale, total


@on_tensor_device
def rms_norm_backward(
    x: Tensor,
    weight_H: Tensor,
    scale: Tensor,
    dy: Tensor,
    added_grad: Tensor | None,
    unit_offset: bool,
    want_dweight: bool,
) -> tuple[Tensor, Tensor | None]:
    x, weight_H, dy = x.contiguous(), weight_H.contiguous(), dy.contiguous()
    added_grad = None if added_grad is None else added_grad.contiguous()
    dx = torch.empty_like(x)
    if not x.numel():
        return dx, torch.zeros_like(weight_H) if want_dweight else None
    rows, hidden = scale.numel(), x.shape[-1]
    rows_per_tile, block = choose_tile(hidden)
    tiles = triton.cdiv(rows, rows_per_tile)
    tiles_per_program = (
        triton.cdiv(tiles, min(tiles, PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(x.device)))
        if want_dweight
        else 1
    )
    programs = triton.cdiv(tiles, tiles_per_program)
    partial = (
        torch.empty(programs, hidden, dtype=torch.float32, device=x.device)
        if want_dweight
        else scale
    )
    # with 16,384 columns (Triton 3.6, sm_90), 16 warps spill 2 values per thread, and 32 values if
    # the weight's gradient is summed too; 32 warps spill no value, and 17 values with that sum
    rms_norm_backward_kernel[(programs,)](
        x,
        weight_H,
        scale,
        dy,
        x if added_grad is None else added_grad,
        dx,
        partial,
        rows,
        hidden,
        tiles_per_program,
        OFFSET=unit_offset,
        HAS_ADDED_GRAD=added_grad is not None,
        DWEIGHT=want_dweight,
        ROWS=rows_per_tile,
        BLOCK=block,
        num_warps=32 if rows_per_tile * block > 8192 else warps(rows_per_tile * block),
    )
    return dx, partial.sum(0).to(weight_H.dtype) if want_dweight else None
