"""gelu(x), exact or tanh: load, widen once, compute, narrow once. One program a block of a row, as in `gelu_mul`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compiled import as_rows
from ..gelu_mul.kernels import BLOCK, halfway, slope
from ..launch import on_its_device


@triton.jit
def gelu_forward_kernel(x, out, x_stride, columns, blocks, TANH: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    # the index of a block's first element takes 64 bits, an index in the block 32
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    inside = i < tl.minimum(columns - first, BLOCK).to(tl.int32)
    g_fp32 = tl.load(x + (row * x_stride + first) + i, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    tl.store(out + (row * columns + first) + i, (g_fp32 * halfway(g_fp32, TANH)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gelu_backward_kernel(x, dy, dx, x_stride, dy_stride, columns, blocks, TANH: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    # the index of a block's first element takes 64 bits, an index in the block 32
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    inside = i < tl.minimum(columns - first, BLOCK).to(tl.int32)
    g_fp32 = tl.load(x + (row * x_stride + first) + i, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    d_fp32 = tl.load(dy + (row * dy_stride + first) + i, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    slope_fp32 = slope(g_fp32, halfway(g_fp32, TANH), TANH)
    tl.store(dx + (row * columns + first) + i, (d_fp32 * slope_fp32).to(dx.dtype.element_ty), mask=inside)


@on_its_device
def gelu_forward(x: Tensor, *, tanh: bool) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        (x_RC,) = as_rows(x)
        rows, columns = x_RC.shape
        blocks = triton.cdiv(columns, BLOCK)
        gelu_forward_kernel[(rows * blocks,)](x_RC, out, x_RC.stride(0), columns, blocks, TANH=tanh, BLOCK=BLOCK)
    return out


@on_its_device
def gelu_backward(x: Tensor, dy: Tensor, *, tanh: bool) -> Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel():
        x_RC, d_RC = as_rows(x, dy)
        rows, columns = x_RC.shape
        blocks = triton.cdiv(columns, BLOCK)
        gelu_backward_kernel[(rows * blocks,)](
            x_RC, d_RC, dx, x_RC.stride(0), d_RC.stride(0), columns, blocks, TANH=tanh, BLOCK=BLOCK
        )  # fmt: skip
    return dx
