"""silu(gate) * up: load, widen once, compute, narrow once. Flat, one program a block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def silu_mul_forward_kernel(gate, up, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g_fp32 = tl.load(gate + i, mask=i < n, other=0.0).to(tl.float32)  # [BLOCK]
    u_fp32 = tl.load(up + i, mask=i < n, other=0.0).to(tl.float32)  # [BLOCK]
    tl.store(out + i, (g_fp32 * tl.sigmoid(g_fp32) * u_fp32).to(out.dtype.element_ty), mask=i < n)


@triton.jit
def silu_mul_backward_kernel(gate, up, dy, dgate, dup, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g_fp32 = tl.load(gate + i, mask=i < n, other=0.0).to(tl.float32)  # [BLOCK]
    u_fp32 = tl.load(up + i, mask=i < n, other=0.0).to(tl.float32)  # [BLOCK]
    d_fp32 = tl.load(dy + i, mask=i < n, other=0.0).to(tl.float32)  # [BLOCK]
    s_fp32 = tl.sigmoid(g_fp32)
    tl.store(dgate + i, (d_fp32 * u_fp32 * s_fp32 * (1.0 + g_fp32 * (1.0 - s_fp32))).to(dgate.dtype.element_ty), mask=i < n)
    tl.store(dup + i, (d_fp32 * g_fp32 * s_fp32).to(dup.dtype.element_ty), mask=i < n)


def silu_mul_forward(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    if out.numel():
        silu_mul_forward_kernel[(triton.cdiv(out.numel(), BLOCK),)](gate, up, out, out.numel(), BLOCK=BLOCK)
    return out


def silu_mul_backward(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    gate, up, dy = gate.contiguous(), up.contiguous(), dy.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    if dy.numel():
        silu_mul_backward_kernel[(triton.cdiv(dy.numel(), BLOCK),)](gate, up, dy, dgate, dup, dy.numel(), BLOCK=BLOCK)
    return dgate, dup


def silu_mul_gradients(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return *silu_mul_backward(gate, up, dy), silu_mul_forward(gate, up)
