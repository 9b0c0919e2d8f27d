"""Defines the ops `rms_norm` and `add_rms_norm`. T is the number of rows, and H the hidden size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import ShapeError
from ..backend import (
    Implementation,
    apply_function,
    arithmetic_dtype,
    can_bypass_dispatcher,
    cast_output,
    choose_implementation,
    refuse_second_derivative,
)
from ..contract import OpContract
from ..cpp import CppKernels
from ..library import library_op

# the output has the dtype of x, for a weight of any dtype, unless the caller passes out_dtype
RMS_NORM = OpContract(
    "x: X[*n H], weight: W[H] -> X[*n H]",
    inside="fp32",
    grads={"x": "X", "weight": "W"},
    autocast="ignored",
)

ADD_RMS_NORM = OpContract(
    "x: F[*n H], residual: F[*n H], weight: W[H] -> F[*n H], F[*n H]",
    inside="fp32",
    grads={"x": "F", "residual": "F", "weight": "W"},
    autocast="ignored",
)


# --- reference


def rms_norm_reference(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    unit_offset: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes RMSNorm in plain PyTorch. It also supports fp64 inputs."""
    h = x.to(arithmetic_dtype(x.dtype, weight.dtype))
    w = weight.to(h.dtype)
    if unit_offset:
        w = w + 1.0
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * w).to(out_dtype or x.dtype)


# --- the C++ kernels of cpu.cpp

KERNELS = CppKernels(__file__, forward="ddppppppiiiif", backward="ddpppppppiiiiii")
# the largest number of partial sums of the weight's gradient, and the smallest number of rows per
# partial sum
_MAX_PARTIAL_SUMS = 64
_MIN_ROWS = 16


def _fake_forward(
    x: Tensor,
    residual: Tensor | None,
    weight_H: Tensor,
    eps: float,
    unit_offset: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    scale = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    total = torch.empty(x.shape if residual is not None else (0,), dtype=x.dtype, device=x.device)
    return torch.empty(x.shape, dtype=out_dtype, device=x.device), scale, total


def _run_cpp_forward(
    x: Tensor,
    residual: Tensor | None,
    weight_H: Tensor,
    eps: float,
    unit_offset: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (y, 1 / rms of each row, x + residual). The last tensor is empty if residual is None."""
    y, scale, total = _fake_forward(x, residual, weight_H, eps, unit_offset, out_dtype)
    _call_cpp_forward(x, residual, weight_H, eps, unit_offset, y, scale, total)
    return y, scale, total


def _norm_without_gradients(
    x: Tensor,
    residual: Tensor | None,
    weight_H: Tensor,
    eps: float,
    unit_offset: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Returns (y, x + residual), or (y, x) if residual is None."""
    y = torch.empty(x.shape, dtype=out_dtype)
    if residual is None:
        _call_cpp_forward(x, None, weight_H, eps, unit_offset, y, None, None)
        return y, x
    total = torch.empty(x.shape, dtype=x.dtype)
    _call_cpp_forward(x, residual, weight_H, eps, unit_offset, y, None, total)
    return y, total


def kernel_weight(weight_H: Tensor, *, unit_offset: bool) -> Tensor:
    """Returns the weight as the kernel reads it: in fp32, without gaps, and with Gemma's 1 added."""
    if weight_H.dtype is not torch.float32:
        weight_H = weight_H.to(torch.float32)
    if weight_H.stride(0) != 1:
        weight_H = weight_H.contiguous()
    if unit_offset:
        weight_H = weight_H + 1.0
    return weight_H


def _call_cpp_forward(
    x: Tensor,
    residual: Tensor | None,
    weight_H: Tensor,
    eps: float,
    unit_offset: bool,
    y: Tensor,
    scale: Tensor | None,
    total: Tensor | None,
) -> None:
    # the kernel reads rows of adjacent values
    x_TH = x.reshape(-1, x.shape[-1])
    if x_TH.stride(1) != 1:
        x_TH = x_TH.contiguous()
    w_H = kernel_weight(weight_H, unit_offset=unit_offset)
    residual_TH = None
    residual_stride = 0
    if residual is not None:
        residual_TH = residual.reshape(-1, residual.shape[-1])
        if residual_TH.stride(1) != 1:
            residual_TH = residual_TH.contiguous()
        residual_stride = residual_TH.stride(0)
    KERNELS(
        "forward",
        x.dtype,
        y.dtype,
        x_TH,
        residual_TH,
        w_H,
        y,
        scale,
        total,
        *x_TH.shape,
        x_TH.stride(0),
        residual_stride,
        eps,
    )


_cpp_forward = library_op(
    "rms_norm_forward_cpp(Tensor x, Tensor? residual, Tensor weight, float eps, bool unit_offset,"
    " ScalarType out_dtype) -> (Tensor, Tensor, Tensor)",
    fake=_fake_forward,
)(_run_cpp_forward)


def _fake_backward(
    x: Tensor,
    weight_H: Tensor,
    scale: Tensor,
    dy: Tensor,
    added_grad: Tensor | None,
    unit_offset: bool,
    want_dweight: bool,
) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), weight_H.new_empty(
        weight_H.shape if want_dweight else (0,)
    )


@library_op(
    "rms_norm_backward_cpp(Tensor x, Tensor weight, Tensor scale, Tensor dy, Tensor? added_grad,"
    " bool unit_offset, bool want_dweight) -> (Tensor, Tensor)",
    fake=_fake_backward,
)
def _cpp_backward(
    x: Tensor,
    weight_H: Tensor,
    scale: Tensor,
    dy: Tensor,
    added_grad: Tensor | None,
    unit_offset: bool,
    want_dweight: bool,
) -> tuple[Tensor, Tensor]:
    dx = torch.empty(x.shape, dtype=x.dtype)
    columns = x.shape[-1]
    w_H = weight_H.to(torch.float32).contiguous()
    if unit_offset:
        w_H = w_H + 1.0
    x_TH = x.reshape(-1, columns)
    if x_TH.stride(1) != 1:
        x_TH = x_TH.contiguous()
    dy_TH = dy.reshape(-1, columns)
    if dy_TH.stride(1) != 1:
        dy_TH = dy_TH.contiguous()
    added_grad_TH = None
    added_grad_stride = 0
    if added_grad is not None:
        added_grad_TH = added_grad.reshape(-1, columns)
        if added_grad_TH.stride(1) != 1:
            added_grad_TH = added_grad_TH.contiguous()
        added_grad_stride = added_grad_TH.stride(0)
    rows = x_TH.shape[0]
    block = max(_MIN_ROWS, -(-rows // _MAX_PARTIAL_SUMS))
    if want_dweight:
        partial_BH = torch.empty((-(-rows // block), columns), dtype=torch.float32)
    else:
        partial_BH = None
    KERNELS(
        "backward",
        x.dtype,
        dy.dtype,
        x_TH,
        w_H,
        scale.contiguous(),
        dy_TH,
        added_grad_TH,
        dx,
        partial_BH,
        rows,
        columns,
        x_TH.stride(0),
        dy_TH.stride(0),
        added_grad_stride,
        block,
    )
    if partial_BH is None:
        return dx, weight_H.new_empty(0)
    # summed in fp32, and narrowed once
    return dx, partial_BH.sum(0).to(weight_H.dtype)


# --- the op


def _forward(
    implementation: Implementation,
    x: Tensor,
    residual: Tensor | None,
    weight_H: Tensor,
    eps: float,
    unit_offset: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns (y, 1 / rms of each row, x + residual or None)."""
    if implementation == "cpp":
        y, scale, summed = _cpp_forward(x, residual, weight_H, eps, unit_offset, out_dtype)
        if residual is None:
            return y, scale, None
        return y, scale, summed
    if implementation == "triton":
        from . import triton

        # longer rows run in plain PyTorch. No model has such rows, and a kernel with a loop would
        # read them twice
        if triton.fits_in_registers(x):
            return triton.rms_norm_forward(x, residual, weight_H, eps, unit_offset, out_dtype)
    normed = x
    total = None
    if residual is not None:
        total = x + residual
        normed = total
    h = cast_output(normed, arithmetic_dtype(x.dtype, weight_H.dtype))
    w = weight_H.to(h.dtype)
    if unit_offset:
        w = w + 1.0
    scale = torch.rsqrt((h * h).mean(-1, keepdim=True) + eps)
    return cast_output(h * scale * w, out_dtype), scale, total


def _backward(
    implementation: Implementation,
    x: Tensor,
    weight_H: Tensor,
    scale: Tensor,
    dy: Tensor,
    added_grad: Tensor | None,
    unit_offset: bool,
    want_dweight: bool,
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of x and weight. `added_grad` is added to the gradient of x."""
    if implementation == "cpp":
        dx, dweight_H = _cpp_backward(x, weight_H, scale, dy, added_grad, unit_offset, want_dweight)
        if not want_dweight:
            return dx, None
        return dx, dweight_H
    if implementation == "triton":
        from . import triton

        if triton.fits_in_registers(x):
            return triton.rms_norm_backward(
                x, weight_H, scale, dy, added_grad, unit_offset, want_dweight
            )
    dtype = scale.dtype
    w = weight_H.to(dtype)
    if unit_offset:
        w = w + 1.0
    normed = x.to(dtype) * scale
    dy_wide = dy.to(dtype)
    g = dy_wide * w
    dx = scale * (g - normed * (g * normed).mean(-1, keepdim=True))
    if added_grad is not None:
        dx = dx + added_grad.to(dtype)
    dx = dx.to(x.dtype)
    if not want_dweight:
        return dx, None
    # summed in the wide dtype, and narrowed once
    dweight_H = (dy_wide * normed).reshape(-1, x.shape[-1]).sum(0)
    return dx, dweight_H.to(weight_H.dtype)


class RmsNorm(torch.autograd.Function):
    """The autograd function of `rms_norm`. It saves its inputs and one fp32 value per row. It never
    writes to the incoming gradient, since a residual connection uses the same tensor.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_H: Tensor,
        eps: float,
        unit_offset: bool,
        out_dtype: torch.dtype,
        implementation: Implementation,
    ) -> Tensor:
        y, scale, _ = _forward(implementation, x, None, weight_H, eps, unit_offset, out_dtype)
        ctx.save_for_backward(x, weight_H, scale)
        ctx.implementation = implementation
        ctx.unit_offset = unit_offset
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("rms_norm")
        x, weight_H, scale = ctx.saved_tensors
        dx, dweight_H = _backward(
            ctx.implementation,
            x,
            weight_H,
            scale,
            dy,
            None,
            ctx.unit_offset,
            ctx.needs_input_grad[1],
        )
        return dx, dweight_H, None, None, None, None


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    unit_offset: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes x / rms(x) * weight in one pass. With unit_offset it computes Gemma's form, x /
    rms(x) * (1 + weight).

    x        X[*n H]   any float dtype, unchanged by autocast
    weight   W[H]      any float dtype; the output keeps the dtype of x if the weight is fp32
    ->       X[*n H]   or out_dtype
    inside   fp32      (fp64 when either is fp64); rounded once, after the multiplication by the
             weight
    grads    x: X      weight: W   summed over rows in fp32
    Raises   ShapeError SH001
    """
    if weight.shape != x.shape[-1:]:
        raise _wrong_weight(x, weight)
    out_dtype = out_dtype or x.dtype
    implementation = choose_implementation(KERNELS, x, weight, out_dtype=out_dtype)
    if implementation == "cpp" and can_bypass_dispatcher(x, weight):
        return _norm_without_gradients(x, None, weight, eps, unit_offset, out_dtype)[0]
    y: Tensor = apply_function(RmsNorm, x, weight, eps, unit_offset, out_dtype, implementation)
    return y


def _wrong_weight(x: Tensor, weight: Tensor) -> ShapeError:
    return ShapeError(
        f"weight is {list(weight.shape)} where x {list(x.shape)} needs {list(x.shape[-1:])}",
        code="SH001",
    )


class AddRmsNorm(torch.autograd.Function):
    """The autograd function of `add_rms_norm`. It saves the sum and one fp32 value per row. The sum
    x + residual gets two gradients, one through the norm and one through the residual connection.
    Backward returns the sum of both gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight_H: Tensor,
        eps: float,
        unit_offset: bool,
        out_dtype: torch.dtype,
        implementation: Implementation,
    ) -> tuple[Tensor, Tensor]:
        y, scale, summed = _forward(
            implementation, x, residual, weight_H, eps, unit_offset, out_dtype
        )
        total = x
        if summed is not None:
            total = summed
        ctx.save_for_backward(total, weight_H, scale)
        ctx.implementation = implementation
        ctx.unit_offset = unit_offset
        # PyTorch may store the tensor that backward returns as a leaf's .grad. If two leaves got
        # the same tensor, each would accumulate into the other's .grad
        ctx.copies_gradient = (
            residual is not None
            and x.is_leaf
            and residual.is_leaf
            and x.requires_grad
            and residual.requires_grad
        )
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("add_rms_norm")
        total, weight_H, scale = ctx.saved_tensors
        needs_x, needs_residual, needs_weight = ctx.needs_input_grad[:3]
        dx: Tensor | None
        if dy is None:
            dx = dtotal
            dweight_H = None
        else:
            dx, dweight_H = _backward(
                ctx.implementation,
                total,
                weight_H,
                scale,
                dy,
                dtotal,
                ctx.unit_offset,
                needs_weight,
            )
        dresidual = dx
        if ctx.copies_gradient and dx is not None:
            dresidual = dx.clone()
        if not needs_x:
            dx = None
        if not needs_residual:
            dresidual = None
        return dx, dresidual, dweight_H, None, None, None, None


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    unit_offset: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (rms_norm(x + residual), x + residual). Forward and backward each read the tensors
    once. The sum x + residual has the promoted dtype of x and residual.

    x, residual  X[*n H]; if `residual` is None, the function returns (rms_norm(x), x); a layer
                 needs this if x is both the input of its norm and its residual
    ->           (normed X[*n H] or out_dtype, sum X[*n H]), each differentiable
    inside       as in `rms_norm`, whose input is the sum after it is rounded to X
    grads        x: X   residual: X   weight: W; the two gradients of the sum are added in fp32 and
                                      rounded once
    Raises       ShapeError SH001
    """
    if residual is not None and x.shape != residual.shape:
        raise ShapeError(
            f"x is {list(x.shape)} and residual is {list(residual.shape)}, declared one shape",
            code="SH001",
        )
    if residual is not None and residual.dtype != x.dtype:
        x = x + residual
        residual = None
    if weight.shape != x.shape[-1:]:
        raise _wrong_weight(x, weight)
    out_dtype = out_dtype or x.dtype
    implementation = choose_implementation(KERNELS, x, weight, out_dtype=out_dtype)
    if implementation == "cpp" and can_bypass_dispatcher(x, residual, weight):
        return _norm_without_gradients(x, residual, weight, eps, unit_offset, out_dtype)
    y, total = apply_function(
        AddRmsNorm, x, residual, weight, eps, unit_offset, out_dtype, implementation
    )
    return y, total
