"""Gated residual kernels: a program a tile of whole rows of one picture. B pictures, T tokens, H hidden.

The gate's gradient, where it is wanted, is summed as those of `modulated_layer_norm` are: in fp32, by programs, without atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import multiprocessors, on_its_device, warps
from ..rms_norm.kernels import PROGRAMS, fits, tile_of

__all__ = ["fits", "gated_residual_backward", "gated_residual_forward"]


@triton.jit
def gated_residual_forward_kernel(residual, x, gate, out, tokens, hidden, tiles, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    picture = (tl.program_id(0) // tiles).to(tl.int64)
    token = (tl.program_id(0) % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    h = tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (h < hidden)[None, :]
    at = (picture * tokens + token)[:, None] * hidden + h[None, :]
    r_fp32 = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    x_fp32 = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    gate_fp32 = tl.load(gate + picture * hidden + h, mask=h < hidden, other=0.0).to(tl.float32)  # [BLOCK]
    tl.store(out + at, (r_fp32 + gate_fp32[None, :] * x_fp32).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_residual_backward_kernel(
    x, gate, dy, dx, partial, tokens, hidden, programs, tiles_each,
    GATE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    picture = (tl.program_id(0) // programs).to(tl.int64)
    program = (tl.program_id(0) % programs).to(tl.int64)
    h = tl.arange(0, BLOCK)
    if GATE:
        dgate_fp32 = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(tiles_each):
        token = (program * tiles_each + tile) * ROWS + tl.arange(0, ROWS)
        inside = (token < tokens)[:, None] & (h < hidden)[None, :]
        at = (picture * tokens + token)[:, None] * hidden + h[None, :]
        d_fp32 = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
        gate_fp32 = tl.load(gate + picture * hidden + h, mask=h < hidden, other=0.0).to(tl.float32)  # [BLOCK]
        tl.store(dx + at, (d_fp32 * gate_fp32[None, :]).to(dx.dtype.element_ty), mask=inside)
        if GATE:
            dgate_fp32 += d_fp32 * tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if GATE:
        tl.store(partial + (picture * programs + program) * hidden + h, tl.sum(dgate_fp32, 0), mask=h < hidden)


@on_its_device
def gated_residual_forward(residual_BTH: Tensor, x_BTH: Tensor, gate_BH: Tensor) -> Tensor:
    residual_BTH, x_BTH, gate_BH = residual_BTH.contiguous(), x_BTH.contiguous(), gate_BH.contiguous()
    out = torch.empty(x_BTH.shape, dtype=x_BTH.dtype, device=x_BTH.device)
    if x_BTH.numel():
        pictures, tokens, hidden = x_BTH.shape
        rows_each, block = tile_of(hidden)
        tiles = triton.cdiv(tokens, rows_each)
        gated_residual_forward_kernel[(pictures * tiles,)](
            residual_BTH, x_BTH, gate_BH, out, tokens, hidden, tiles, ROWS=rows_each, BLOCK=block, num_warps=warps(rows_each * block)
        )  # fmt: skip
    return out


@on_its_device
def gated_residual_backward(x_BTH: Tensor, gate_BH: Tensor, dy_BTH: Tensor, *, want_gate: bool) -> tuple[Tensor, Tensor | None]:
    x_BTH, gate_BH, dy_BTH = x_BTH.contiguous(), gate_BH.contiguous(), dy_BTH.contiguous()
    pictures, tokens, hidden = x_BTH.shape
    dx_BTH = torch.empty_like(x_BTH)
    if not x_BTH.numel():
        return dx_BTH, torch.zeros_like(gate_BH) if want_gate else None
    rows_each, block = tile_of(hidden)
    tiles = triton.cdiv(tokens, rows_each)
    most = max(1, PROGRAMS * multiprocessors(x_BTH.device) // pictures)
    tiles_each = triton.cdiv(tiles, min(tiles, most)) if want_gate else 1
    programs = triton.cdiv(tiles, tiles_each)
    partial = torch.empty((pictures, programs, hidden), dtype=torch.float32, device=x_BTH.device) if want_gate else dx_BTH
    gated_residual_backward_kernel[(pictures * programs,)](
        x_BTH, gate_BH, dy_BTH, dx_BTH, partial, tokens, hidden, programs, tiles_each,
        GATE=want_gate, ROWS=rows_each, BLOCK=block, num_warps=warps(rows_each * block),
    )  # fmt: skip
    return dx_BTH, partial.sum(1).to(gate_BH.dtype) if want_gate else None
