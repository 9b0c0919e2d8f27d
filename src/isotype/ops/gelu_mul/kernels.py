"""gelu(gate) * up, exact or tanh: load, widen once, compute, narrow once. Flat, one program a block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def halfway(g_fp32, TANH: tl.constexpr):
    """The normal distribution's function at g, or its tanh approximation."""
    if TANH:
        # 0.5 (1 + tanh(u)) = sigmoid(2u), u = sqrt(2/pi) (g + 0.044715 g^3)
        cdf_fp32 = tl.sigmoid(1.5957691216057308 * (g_fp32 + 0.044715 * g_fp32 * g_fp32 * g_fp32))
    else:
        cdf_fp32 = 0.5 * (1.0 + tl.erf(g_fp32 * 0.7071067811865476))
    return cdf_fp32


@triton.jit
def gelu_mul_forward_kernel(gate, up, out, n, TANH: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g_fp32 = tl.load(gate + i, mask=i < n, other=0.0).to(tl.float32)  # [BLOCK]
    u_fp32 = tl.load(up + i, mask=i < n, other=0.0).to(tl.float32)  # [BLOCK]
    tl.store(out + i, (g_fp32 * halfway(g_fp32, TANH) * u_fp32).to(out.dtype.element_ty), mask=i < n)


@triton.jit
def gelu_mul_backward_kernel(gate, up, dy, dgate, dup, n, TANH: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g_fp32 = tl.load(gate + i, mask=i < n, other=0.0).to(tl.float32)  # [BLOCK]
    u_fp32 = tl.load(up + i, mask=i < n, other=0.0).to(tl.float32)  # [BLOCK]
    d_fp32 = tl.load(dy + i, mask=i < n, other=0.0).to(tl.float32)  # [BLOCK]
    cdf_fp32 = halfway(g_fp32, TANH)
    if TANH:
        slope_fp32 = cdf_fp32 + g_fp32 * cdf_fp32 * (1.0 - cdf_fp32) * 1.5957691216057308 * (1.0 + 0.134145 * g_fp32 * g_fp32)
    else:
        slope_fp32 = cdf_fp32 + g_fp32 * tl.exp(-0.5 * g_fp32 * g_fp32) * 0.3989422804014327
    tl.store(dgate + i, (d_fp32 * u_fp32 * slope_fp32).to(dgate.dtype.element_ty), mask=i < n)
    tl.store(dup + i, (d_fp32 * g_fp32 * cdf_fp32).to(dup.dtype.element_ty), mask=i < n)


def gelu_mul_forward(gate: Tensor, up: Tensor, *, tanh: bool) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    if out.numel():
        gelu_mul_forward_kernel[(triton.cdiv(out.numel(), BLOCK),)](gate, up, out, out.numel(), TANH=tanh, BLOCK=BLOCK)
    return out


def gelu_mul_backward(gate: Tensor, up: Tensor, dy: Tensor, *, tanh: bool) -> tuple[Tensor, Tensor]:
    gate, up, dy = gate.contiguous(), up.contiguous(), dy.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    if dy.numel():
        gelu_mul_backward_kernel[(triton.cdiv(dy.numel(), BLOCK),)](gate, up, dy, dgate, dup, dy.numel(), TANH=tanh, BLOCK=BLOCK)
    return dgate, dup


def gelu_mul_gradients(gate: Tensor, up: Tensor, dy: Tensor, *, tanh: bool) -> tuple[Tensor, Tensor, Tensor]:
    return *gelu_mul_backward(gate, up, dy, tanh=tanh), gelu_mul_forward(gate, up, tanh=tanh)
