"""silu(gate) * up: load, widen once, compute, narrow once. One program a block of a row; contiguous tensors are one row.

gate and up may be halves of one projection: their rows are then further apart than they are long.
"""

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
def silu_mul_forward_kernel(gate, up, out, gate_stride, up_stride, columns, blocks, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    # the index of a block's first element takes 64 bits, an index in the block 32
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    inside = i < tl.minimum(columns - first, BLOCK).to(tl.int32)
    g_fp32 = tl.load(gate + (row * gate_stride + first) + i, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    u_fp32 = tl.load(up + (row * up_stride + first) + i, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    tl.store(out + (row * columns + first) + i, (g_fp32 * tl.sigmoid(g_fp32) * u_fp32).to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_backward_kernel(
    gate, up, dy, dgate, dup, out, gate_stride, up_stride, dy_stride, columns, blocks, PRODUCT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = (tl.program_id(0) // blocks).to(tl.int64)
    # the index of a block's first element takes 64 bits, an index in the block 32
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    inside = i < tl.minimum(columns - first, BLOCK).to(tl.int32)
    g_fp32 = tl.load(gate + (row * gate_stride + first) + i, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    u_fp32 = tl.load(up + (row * up_stride + first) + i, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    d_fp32 = tl.load(dy + (row * dy_stride + first) + i, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    s_fp32 = tl.sigmoid(g_fp32)
    to = row * columns + first
    tl.store(dgate + to + i, (d_fp32 * u_fp32 * s_fp32 * (1.0 + g_fp32 * (1.0 - s_fp32))).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + to + i, (d_fp32 * g_fp32 * s_fp32).to(dup.dtype.element_ty), mask=inside)
    if PRODUCT:
        tl.store(out + to + i, (g_fp32 * s_fp32 * u_fp32).to(out.dtype.element_ty), mask=inside)


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


@on_its_device
def silu_mul_forward(gate: Tensor, up: Tensor) -> Tensor:
    out = _empty(gate)
    if out.numel():
        g_RC, u_RC = as_rows(gate, up)
        rows, columns = g_RC.shape
        blocks = triton.cdiv(columns, BLOCK)
        silu_mul_forward_kernel[(rows * blocks,)](g_RC, u_RC, out, g_RC.stride(0), u_RC.stride(0), columns, blocks, BLOCK=BLOCK)
    return out


def silu_mul_backward(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup, _ = _backward(gate, up, dy, product=False)
    return dgate, dup


def silu_mul_gradients(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The backward, and the product again, in one pass: six tensors through memory instead of eight."""
    return _backward(gate, up, dy, product=True)


def silu_mul_gradients_(gate: Tensor, up: Tensor, dy: Tensor) -> None:
    """`silu_mul_gradients` over gate, up and dy themselves."""
    _backward(gate, up, dy, product=True, over=True)


@on_its_device
def _backward(gate: Tensor, up: Tensor, dy: Tensor, *, product: bool, over: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """over: the results are written over the inputs, which are contiguous: a program has read its block before it writes it"""
    dgate, dup = (gate, up) if over else (_empty(gate), _empty(up))
    out = dy if over else _empty(gate) if product else dgate
    if dy.numel():
        g_RC, u_RC, d_RC = as_rows(gate, up, dy)
        rows, columns = g_RC.shape
        blocks = triton.cdiv(columns, BLOCK)
        silu_mul_backward_kernel[(rows * blocks,)](
            g_RC, u_RC, d_RC, dgate, dup, out, g_RC.stride(0), u_RC.stride(0), d_RC.stride(0), columns, blocks, PRODUCT=product, BLOCK=BLOCK
        )
    return dgate, dup, out
