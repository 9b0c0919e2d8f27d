"""gelu(gate) * up, exact or tanh: load, widen once, compute, narrow once. One program a block of a row, as in `silu_mul`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compiled import as_rows
from ..launch import on_its_device

# 8 values a thread at 4 warps: one load of 16 bytes a tensor in bf16, and 2,048 threads of a multiprocessor have 64 KiB on their way
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
def slope(g_fp32, cdf_fp32, TANH: tl.constexpr):
    """gelu's derivative at g, where `halfway` is cdf."""
    if TANH:
        slope_fp32 = cdf_fp32 + g_fp32 * cdf_fp32 * (1.0 - cdf_fp32) * 1.5957691216057308 * (1.0 + 0.134145 * g_fp32 * g_fp32)
    else:
        slope_fp32 = cdf_fp32 + g_fp32 * tl.exp(-0.5 * g_fp32 * g_fp32) * 0.3989422804014327
    return slope_fp32


@triton.jit
def gelu_mul_forward_kernel(gate, up, out, gate_stride, up_stride, columns, blocks, TANH: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    # the index of a block's first element takes 64 bits, an index in the block 32
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    inside = i < tl.minimum(columns - first, BLOCK).to(tl.int32)
    g_fp32 = tl.load(gate + (row * gate_stride + first) + i, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    u_fp32 = tl.load(up + (row * up_stride + first) + i, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    tl.store(out + (row * columns + first) + i, (g_fp32 * halfway(g_fp32, TANH) * u_fp32).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gelu_mul_backward_kernel(
    gate, up, dy, dgate, dup, out, gate_stride, up_stride, dy_stride, columns, blocks,
    TANH: tl.constexpr, PRODUCT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // blocks).to(tl.int64)
    # the index of a block's first element takes 64 bits, an index in the block 32
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    inside = i < tl.minimum(columns - first, BLOCK).to(tl.int32)
    g_fp32 = tl.load(gate + (row * gate_stride + first) + i, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    u_fp32 = tl.load(up + (row * up_stride + first) + i, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    d_fp32 = tl.load(dy + (row * dy_stride + first) + i, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    cdf_fp32 = halfway(g_fp32, TANH)
    slope_fp32 = slope(g_fp32, cdf_fp32, TANH)
    to = row * columns + first
    tl.store(dgate + to + i, (d_fp32 * u_fp32 * slope_fp32).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + to + i, (d_fp32 * g_fp32 * cdf_fp32).to(dup.dtype.element_ty), mask=inside)
    if PRODUCT:
        tl.store(out + to + i, (g_fp32 * cdf_fp32 * u_fp32).to(out.dtype.element_ty), mask=inside)


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


@on_its_device
def gelu_mul_forward(gate: Tensor, up: Tensor, *, tanh: bool) -> Tensor:
    out = _empty(gate)
    if out.numel():
        g_RC, u_RC = as_rows(gate, up)
        rows, columns = g_RC.shape
        blocks = triton.cdiv(columns, BLOCK)
        gelu_mul_forward_kernel[(rows * blocks,)](g_RC, u_RC, out, g_RC.stride(0), u_RC.stride(0), columns, blocks, TANH=tanh, BLOCK=BLOCK)
    return out


def gelu_mul_backward(gate: Tensor, up: Tensor, dy: Tensor, *, tanh: bool) -> tuple[Tensor, Tensor]:
    dgate, dup, _ = _backward(gate, up, dy, tanh=tanh, product=False)
    return dgate, dup


def gelu_mul_gradients(gate: Tensor, up: Tensor, dy: Tensor, *, tanh: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The backward, and the product again, in one pass: six tensors through memory instead of eight."""
    return _backward(gate, up, dy, tanh=tanh, product=True)


def gelu_mul_gradients_(gate: Tensor, up: Tensor, dy: Tensor, *, tanh: bool) -> None:
    """`gelu_mul_gradients` over gate, up and dy themselves."""
    _backward(gate, up, dy, tanh=tanh, product=True, over=True)


@on_its_device
def _backward(gate: Tensor, up: Tensor, dy: Tensor, *, tanh: bool, product: bool, over: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """over: the results are written over the inputs, which are contiguous: a program has read its block before it writes it"""
    dgate, dup = (gate, up) if over else (_empty(gate), _empty(up))
    out = dy if over else _empty(gate) if product else dgate
    if dy.numel():
        g_RC, u_RC, d_RC = as_rows(gate, up, dy)
        rows, columns = g_RC.shape
        blocks = triton.cdiv(columns, BLOCK)
        gelu_mul_backward_kernel[(rows * blocks,)](
            g_RC, u_RC, d_RC, dgate, dup, out, g_RC.stride(0), u_RC.stride(0), d_RC.stride(0), columns, blocks,
            TANH=tanh, PRODUCT=product, BLOCK=BLOCK,
        )  # fmt: skip
    return dgate, dup, out
