"""Triton kernels of the modulated LayerNorm and the gated residual. Each Triton program computes a
tile of whole rows of one picture. B is the number of pictures, T the number of tokens, and H the
hidden size.

For the gradients of scale, shift and gate, each Triton program sums over several tiles in fp32. The
sums of all programs are then added together. No kernel uses atomic additions, so the order of
additions depends only on the shapes and the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import multiprocessors, on_tensor_device, warps
from ..rms_norm.triton import PROGRAMS_PER_MULTIPROCESSOR, choose_tile
from ..rms_norm.triton import fits_in_registers as fits_in_registers


@triton.jit
def gated_residual_forward_kernel(
    residual, x, gate, out, tokens, hidden, tiles, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    picture = (tl.program_id(0) // tiles).to(tl.int64)
    token = (tl.program_id(0) % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    h = tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (h < hidden)[None, :]
    offsets = (picture * tokens + token)[:, None] * hidden + h[None, :]
    r_fp32 = tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    x_fp32 = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    gate_fp32 = tl.load(gate + picture * hidden + h, mask=h < hidden, other=0.0).to(
        tl.float32
    )  # [BLOCK]
    tl.store(
        out + offsets, (r_fp32 + gate_fp32[None, :] * x_fp32).to(out.dtype.element_ty), mask=inside
    )


@triton.jit
def gated_residual_backward_kernel(
    x,
    gate,
    dy,
    dx,
    partial,
    tokens,
    hidden,
    programs,
    tiles_per_program,
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    picture = (tl.program_id(0) // programs).to(tl.int64)
    program = (tl.program_id(0) % programs).to(tl.int64)
    h = tl.arange(0, BLOCK)
    if GATE:
        dgate_fp32 = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(tiles_per_program):
        token = (program * tiles_per_program + tile) * ROWS + tl.arange(0, ROWS)
        inside = (token < tokens)[:, None] & (h < hidden)[None, :]
        offsets = (picture * tokens + token)[:, None] * hidden + h[None, :]
        d_fp32 = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
        gate_fp32 = tl.load(gate + picture * hidden + h, mask=h < hidden, other=0.0).to(
            tl.float32
        )  # [BLOCK]
        tl.store(dx + offsets, (d_fp32 * gate_fp32[None, :]).to(dx.dtype.element_ty), mask=inside)
        if GATE:
            dgate_fp32 += d_fp32 * tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    if GATE:
        tl.store(
            partial + (picture * programs + program) * hidden + h,
            tl.sum(dgate_fp32, 0),
            mask=h < hidden,
        )


@on_tensor_device
def gated_residual_forward(residual_BTH: Tensor, x_BTH: Tensor, gate_BH: Tensor) -> Tensor:
    residual_BTH, x_BTH, gate_BH = (
        residual_BTH.contiguous(),
        x_BTH.contiguous(),
        gate_BH.contiguous(),
    )
    out = torch.empty(x_BTH.shape, dtype=x_BTH.dtype, device=x_BTH.device)
    if x_BTH.numel():
        pictures, tokens, hidden = x_BTH.shape
        rows_per_tile, block = choose_tile(hidden)
        tiles = triton.cdiv(tokens, rows_per_tile)
        gated_residual_forward_kernel[(pictures * tiles,)](
            residual_BTH,
            x_BTH,
            gate_BH,
            out,
            tokens,
            hidden,
            tiles,
            ROWS=rows_per_tile,
            BLOCK=block,
            num_warps=warps(rows_per_tile * block),
        )
    return out


@on_tensor_device
def gated_residual_backward(
    x_BTH: Tensor, gate_BH: Tensor, dy_BTH: Tensor, want_gate: bool
) -> tuple[Tensor, Tensor | None]:
    x_BTH, gate_BH, dy_BTH = x_BTH.contiguous(), gate_BH.contiguous(), dy_BTH.contiguous()
    pictures, tokens, hidden = x_BTH.shape
    dx_BTH = torch.empty_like(x_BTH)
    if not x_BTH.numel():
        return dx_BTH, torch.zeros_like(gate_BH) if want_gate else None
    rows_per_tile, block = choose_tile(hidden)
    tiles = triton.cdiv(tokens, rows_per_tile)
    max_programs = max(1, PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(x_BTH.device) // pictures)
    tiles_per_program = triton.cdiv(tiles, min(tiles, max_programs)) if want_gate else 1
    programs = triton.cdiv(tiles, tiles_per_program)
    partial = (
        torch.empty((pictures, programs, hidden), dtype=torch.float32, device=x_BTH.device)
        if want_gate
        else dx_BTH
    )
    gated_residual_backward_kernel[(pictures * programs,)](
        x_BTH,
        gate_BH,
        dy_BTH,
        dx_BTH,
        partial,
        tokens,
        hidden,
        programs,
        tiles_per_program,
        GATE=want_gate,
        ROWS=rows_per_tile,
        BLOCK=block,
        num_warps=warps(rows_per_tile * block),
    )
    return dx_BTH, partial.sum(1).to(gate_BH.dtype) if want_gate else None


@triton.jit
def modulated_layer_norm_forward_kernel(
    x, scale, shift, out, tokens, hidden, tiles, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    picture = (tl.program_id(0) // tiles).to(tl.int64)
    token = (tl.program_id(0) % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    h = tl.arange(0, BLOCK)
    columns = (h < hidden)[None, :]
    inside = (token < tokens)[:, None] & columns
    offsets = (picture * tokens + token)[:, None] * hidden + h[None, :]
    x_fp32 = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    scale_fp32 = tl.load(scale + picture * hidden + h, mask=h < hidden, other=0.0).to(
        tl.float32
    )  # [BLOCK]
    shift_fp32 = tl.load(shift + picture * hidden + h, mask=h < hidden, other=0.0).to(
        tl.float32
    )  # [BLOCK]
    mean_fp32 = tl.sum(x_fp32, 1) / hidden  # [ROWS]
    centred_fp32 = tl.where(columns, x_fp32 - mean_fp32[:, None], 0.0)
    factor_fp32 = 1.0 / tl.sqrt(
        tl.sum(centred_fp32 * centred_fp32, 1) / hidden + eps.to(tl.float32)
    )  # [ROWS]
    y_fp32 = centred_fp32 * factor_fp32[:, None] * (1.0 + scale_fp32)[None, :] + shift_fp32[None, :]
    tl.store(out + offsets, y_fp32.to(out.dtype.element_ty), mask=inside)


@triton.jit
def modulated_layer_norm_backward_kernel(
    x,
    scale,
    dy,
    dx,
    partial,
    tokens,
    hidden,
    programs,
    tiles_per_program,
    eps,
    MODULATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    picture = (tl.program_id(0) // programs).to(tl.int64)
    program = (tl.program_id(0) % programs).to(tl.int64)
    h = tl.arange(0, BLOCK)
    columns = (h < hidden)[None, :]
    if MODULATION:
        dscale_fp32 = tl.zeros([ROWS, BLOCK], tl.float32)
        dshift_fp32 = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(tiles_per_program):
        token = (program * tiles_per_program + tile) * ROWS + tl.arange(0, ROWS)
        inside = (token < tokens)[:, None] & columns
        offsets = (picture * tokens + token)[:, None] * hidden + h[None, :]
        x_fp32 = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
        d_fp32 = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
        # the scale is loaded again for every tile, from the cache. In registers it would take one
        # register per value
        scale_fp32 = tl.load(scale + picture * hidden + h, mask=h < hidden, other=0.0).to(
            tl.float32
        )  # [BLOCK]
        mean_fp32 = tl.sum(x_fp32, 1) / hidden  # [ROWS]
        centred_fp32 = tl.where(columns, x_fp32 - mean_fp32[:, None], 0.0)
        factor_fp32 = (
            1.0 / tl.sqrt(tl.sum(centred_fp32 * centred_fp32, 1) / hidden + eps.to(tl.float32))
        )[:, None]  # [ROWS, 1]
        normed_fp32 = centred_fp32 * factor_fp32
        g_fp32 = d_fp32 * (1.0 + scale_fp32)[None, :]
        mean_g_fp32 = (tl.sum(g_fp32, 1) / hidden)[:, None]  # [ROWS, 1]
        projection_fp32 = (tl.sum(g_fp32 * normed_fp32, 1) / hidden)[:, None]  # [ROWS, 1]
        dx_fp32 = factor_fp32 * (g_fp32 - mean_g_fp32 - normed_fp32 * projection_fp32)
        tl.store(dx + offsets, dx_fp32.to(dx.dtype.element_ty), mask=inside)
        if MODULATION:
            dscale_fp32 += d_fp32 * normed_fp32
            dshift_fp32 += d_fp32
    if MODULATION:
        partial_start = (picture * programs + program) * 2 * hidden + h
        tl.store(partial + partial_start, tl.sum(dscale_fp32, 0), mask=h < hidden)
        tl.store(partial + partial_start + hidden, tl.sum(dshift_fp32, 0), mask=h < hidden)


@on_tensor_device
def modulated_layer_norm_forward(
    x_BTH: Tensor, scale_BH: Tensor, shift_BH: Tensor, eps: float, out_dtype: torch.dtype
) -> Tensor:
    x_BTH, scale_BH, shift_BH = x_BTH.contiguous(), scale_BH.contiguous(), shift_BH.contiguous()
    out = torch.empty(x_BTH.shape, dtype=out_dtype, device=x_BTH.device)
    if x_BTH.numel():
        pictures, tokens, hidden = x_BTH.shape
        rows_per_tile, block = choose_tile(hidden)
        tiles = triton.cdiv(tokens, rows_per_tile)
        modulated_layer_norm_forward_kernel[(pictures * tiles,)](
            x_BTH,
            scale_BH,
            shift_BH,
            out,
            tokens,
            hidden,
            tiles,
            eps,
            ROWS=rows_per_tile,
            BLOCK=block,
            num_warps=warps(rows_per_tile * block),
        )
    return out


@on_tensor_device
def modulated_layer_norm_backward(
    x_BTH: Tensor, scale_BH: Tensor, dy_BTH: Tensor, eps: float, want_modulation: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    x_BTH, scale_BH, dy_BTH = x_BTH.contiguous(), scale_BH.contiguous(), dy_BTH.contiguous()
    pictures, tokens, hidden = x_BTH.shape
    dx_BTH = torch.empty_like(x_BTH)
    if not x_BTH.numel():
        return dx_BTH, *(
            (torch.zeros_like(scale_BH), torch.zeros_like(scale_BH))
            if want_modulation
            else (None, None)
        )
    rows_per_tile, block = choose_tile(hidden)
    tiles = triton.cdiv(tokens, rows_per_tile)
    max_programs = max(1, PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(x_BTH.device) // pictures)
    tiles_per_program = triton.cdiv(tiles, min(tiles, max_programs)) if want_modulation else 1
    programs = triton.cdiv(tiles, tiles_per_program)
    shape = (pictures, programs, 2, hidden)
    partial = (
        torch.empty(shape, dtype=torch.float32, device=x_BTH.device) if want_modulation else dx_BTH
    )
    modulated_layer_norm_backward_kernel[(pictures * programs,)](
        x_BTH,
        scale_BH,
        dy_BTH,
        dx_BTH,
        partial,
        tokens,
        hidden,
        programs,
        tiles_per_program,
        eps,
        MODULATION=want_modulation,
        ROWS=rows_per_tile,
        BLOCK=block,
        num_warps=warps(rows_per_tile * block),
    )
    if not want_modulation:
        return dx_BTH, None, None
    dscale_BH, dshift_BH = partial.sum(1).to(scale_BH.dtype).unbind(1)
    return dx_BTH, dscale_BH, dshift_BH
