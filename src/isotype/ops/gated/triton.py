"""Triton kernels that compute an activation, alone or multiplied by `up`. A kernel converts each
loaded value to fp32, computes in fp32, and rounds each result once. Each Triton program computes a
block of a row. A contiguous tensor is treated as one row.

gate and up may be the two halves of the output of one projection. Then the rows of gate are not
adjacent in memory, and neither are the rows of up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cpp import view_as_rows
from ..launch import on_tensor_device

# 8 values per thread with 4 warps, which are one load of 16 bytes per tensor in bf16. The 2,048
# threads of a multiprocessor then have 64 KiB of loads in progress at the same time
BLOCK = 1024


@triton.jit
def activation_factor(x_fp32, ACTIVATION: tl.constexpr):
    """Returns the factor by which the activation multiplies x."""
    if ACTIVATION == "gelu":
        # the cumulative distribution function of the normal distribution
        factor_fp32 = 0.5 * (1.0 + tl.erf(x_fp32 * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh(u)) = sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
        factor_fp32 = tl.sigmoid(
            1.5957691216057308 * (x_fp32 + 0.044715 * x_fp32 * x_fp32 * x_fp32)
        )
    else:
        factor_fp32 = tl.sigmoid(x_fp32)
    return factor_fp32


@triton.jit
def activation_slope(x_fp32, factor_fp32, ACTIVATION: tl.constexpr):
    """Returns the activation's derivative at x, from the result of `activation_factor`."""
    if ACTIVATION == "gelu":
        slope_fp32 = factor_fp32 + x_fp32 * tl.exp(-0.5 * x_fp32 * x_fp32) * 0.3989422804014327
    elif ACTIVATION == "gelu_tanh":
        slope_fp32 = factor_fp32 + x_fp32 * factor_fp32 * (
            1.0 - factor_fp32
        ) * 1.5957691216057308 * (1.0 + 0.134145 * x_fp32 * x_fp32)
    else:
        slope_fp32 = factor_fp32 * (1.0 + x_fp32 * (1.0 - factor_fp32))
    return slope_fp32


@triton.jit
def gated_forward_kernel(
    x,
    up,
    out,
    x_stride,
    up_stride,
    columns,
    blocks,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    # the index of a block's first element takes 64 bits, an index in the block 32
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    inside = i < tl.minimum(columns - first, BLOCK).to(tl.int32)
    x_fp32 = tl.load(x + (row * x_stride + first) + i, mask=inside, other=0.0).to(
        tl.float32
    )  # [BLOCK]
    y_fp32 = x_fp32 * activation_factor(x_fp32, ACTIVATION)
    if GATED:
        y_fp32 *= tl.load(up + (row * up_stride + first) + i, mask=inside, other=0.0).to(
            tl.float32
        )  # [BLOCK]
    tl.store(out + (row * columns + first) + i, y_fp32.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward_kernel(
    x,
    up,
    dy,
    dx,
    dup,
    out,
    x_stride,
    up_stride,
    dy_stride,
    columns,
    blocks,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    # the index of a block's first element takes 64 bits, an index in the block 32
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    inside = i < tl.minimum(columns - first, BLOCK).to(tl.int32)
    x_fp32 = tl.load(x + (row * x_stride + first) + i, mask=inside, other=0.0).to(
        tl.float32
    )  # [BLOCK]
    d_fp32 = tl.load(dy + (row * dy_stride + first) + i, mask=inside, other=0.0).to(
        tl.float32
    )  # [BLOCK]
    factor_fp32 = activation_factor(x_fp32, ACTIVATION)
    slope_fp32 = activation_slope(x_fp32, factor_fp32, ACTIVATION)
    out_start = row * columns + first
    y_fp32 = x_fp32 * factor_fp32
    if GATED:
        u_fp32 = tl.load(up + (row * up_stride + first) + i, mask=inside, other=0.0).to(
            tl.float32
        )  # [BLOCK]
        tl.store(
            dx + out_start + i, (d_fp32 * u_fp32 * slope_fp32).to(dx.dtype.element_ty), mask=inside
        )
        tl.store(dup + out_start + i, (d_fp32 * y_fp32).to(dup.dtype.element_ty), mask=inside)
        y_fp32 *= u_fp32
    else:
        tl.store(dx + out_start + i, (d_fp32 * slope_fp32).to(dx.dtype.element_ty), mask=inside)
    if PRODUCT:
        tl.store(out + out_start + i, y_fp32.to(out.dtype.element_ty), mask=inside)


def _empty_like(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


@on_tensor_device
def gated_forward(x: Tensor, up: Tensor | None, activation: str) -> Tensor:
    out = _empty_like(x)
    if out.numel():
        x_RC, u_RC = view_as_rows(x, x if up is None else up)
        rows, columns = x_RC.shape
        blocks = triton.cdiv(columns, BLOCK)
        gated_forward_kernel[(rows * blocks,)](
            x_RC,
            u_RC,
            out,
            x_RC.stride(0),
            u_RC.stride(0),
            columns,
            blocks,
            ACTIVATION=activation,
            GATED=up is not None,
            BLOCK=BLOCK,
        )
    return out


@on_tensor_device
def gated_backward(
    x: Tensor,
    up: Tensor | None,
    dy: Tensor,
    activation: str,
    returns_product: bool,
    in_place: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Computes the gradients of x and up, and the result of the forward, in one pass. If all three
    are needed, it reads and writes six tensors in total. Separate passes would read and write eight
    tensors.

    in_place  the results overwrite the inputs, which must be contiguous; each program reads its
              block before it writes it
    """
    dx = x if in_place else _empty_like(x)
    dup = None if up is None else up if in_place else _empty_like(up)
    out = None if not returns_product else dy if in_place else _empty_like(x)
    if dy.numel():
        x_RC, u_RC, d_RC = view_as_rows(x, x if up is None else up, dy)
        rows, columns = x_RC.shape
        blocks = triton.cdiv(columns, BLOCK)
        gated_backward_kernel[(rows * blocks,)](
            x_RC,
            u_RC,
            d_RC,
            dx,
            dx if dup is None else dup,
            dx if out is None else out,
            x_RC.stride(0),
            u_RC.stride(0),
            d_RC.stride(0),
            columns,
            blocks,
            ACTIVATION=activation,
            GATED=up is not None,
            PRODUCT=returns_product,
            BLOCK=BLOCK,
        )
    return dx, dup, out
