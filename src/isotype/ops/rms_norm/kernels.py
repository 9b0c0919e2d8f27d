"""RMSNorm kernels: forward one program a row; backward one program a run of rows, with the weight's gradient summed in fp32. H hidden."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs of the backward: each keeps one fp32 row of partial sums of the weight's gradient
PROGRAMS = 256


@triton.jit
def rms_norm_forward_kernel(x, weight, out, scale, hidden, eps, OFFSET: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    inside = h < hidden
    x_fp32 = tl.load(x + row * hidden + h, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    w_fp32 = tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    if OFFSET:
        w_fp32 += 1.0
    scale_fp32 = 1.0 / tl.sqrt(tl.sum(x_fp32 * x_fp32, 0) / hidden + eps)
    tl.store(out + row * hidden + h, (x_fp32 * scale_fp32 * w_fp32).to(out.dtype.element_ty), mask=inside)
    tl.store(scale + row, scale_fp32)


@triton.jit
def rms_norm_backward_kernel(x, weight, scale, dy, dx, partial, rows, hidden, rows_each, OFFSET: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    inside = h < hidden
    w_fp32 = tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    if OFFSET:
        w_fp32 += 1.0
    dw_fp32 = tl.zeros([BLOCK], tl.float32)
    for row in range(program * rows_each, tl.minimum(program * rows_each + rows_each, rows)):
        x_fp32 = tl.load(x + row * hidden + h, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
        d_fp32 = tl.load(dy + row * hidden + h, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
        scale_fp32 = tl.load(scale + row).to(tl.float32)
        normed_fp32 = x_fp32 * scale_fp32
        g_fp32 = d_fp32 * w_fp32
        dx_fp32 = scale_fp32 * (g_fp32 - normed_fp32 * (tl.sum(g_fp32 * normed_fp32, 0) / hidden))
        tl.store(dx + row * hidden + h, dx_fp32.to(dx.dtype.element_ty), mask=inside)
        dw_fp32 += d_fp32 * normed_fp32
    tl.store(partial + program * hidden + h, dw_fp32, mask=inside)


def _warps(block: int) -> int:
    return 4 if block <= 2048 else 8 if block <= 8192 else 16


def rms_norm_forward(x_TH: Tensor, weight_H: Tensor, *, eps: float, unit_offset: bool, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x_TH, weight_H = x_TH.contiguous(), weight_H.contiguous()
    rows, hidden = x_TH.shape
    out = torch.empty(x_TH.shape, dtype=out_dtype, device=x_TH.device)
    scale_T1 = torch.empty(rows, 1, dtype=torch.float32, device=x_TH.device)
    if x_TH.numel():
        block = triton.next_power_of_2(hidden)
        rms_norm_forward_kernel[(rows,)](
            x_TH, weight_H, out, scale_T1, hidden, eps, OFFSET=unit_offset, BLOCK=block, num_warps=_warps(block)
        )
    return out, scale_T1


def rms_norm_backward(
    x_TH: Tensor, weight_H: Tensor, scale_T1: Tensor, dy_TH: Tensor, *, unit_offset: bool, want_dweight: bool
) -> tuple[Tensor, Tensor | None]:
    x_TH, weight_H, dy_TH = x_TH.contiguous(), weight_H.contiguous(), dy_TH.contiguous()
    rows, hidden = x_TH.shape
    dx_TH = torch.empty_like(x_TH)
    if not x_TH.numel():
        return dx_TH, torch.zeros_like(weight_H) if want_dweight else None
    programs = min(rows, PROGRAMS)
    each = triton.cdiv(rows, programs)
    partial = torch.empty(programs, hidden, dtype=torch.float32, device=x_TH.device)
    block = triton.next_power_of_2(hidden)
    rms_norm_backward_kernel[(programs,)](
        x_TH, weight_H, scale_T1, dy_TH, dx_TH, partial, rows, hidden, each, OFFSET=unit_offset, BLOCK=block, num_warps=_warps(block)
    )
    return dx_TH, partial.sum(0).to(weight_H.dtype) if want_dweight else None
