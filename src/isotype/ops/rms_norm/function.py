"""`rms_norm` and `add_rms_norm`: the public ops and their autograd function. T rows, H hidden."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import ShapeError
from ..applied import applied
from ..autocast import autocast_off, no_view
from ..backend import cpp_runs, differentiated_again, reference_gradients, reference_runs, triton_runs
from ..debug import checked_in_debug
from . import cpp, eager
from .contract import ADD_RMS_NORM, RMS_NORM
from .reference import rms_norm_reference


class Paths(Protocol):
    """What each of the op's modules offers: `kernels`, `cpp` and `eager`."""

    def rms_norm_forward(
        self, x_TH: Tensor, weight_H: Tensor, residual_TH: Tensor | None = None, *, eps: float, unit_offset: bool, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]: ...
    def rms_norm_backward(
        self,
        x_TH: Tensor,
        weight_H: Tensor,
        scale_T1: Tensor,
        dy_TH: Tensor,
        more_TH: Tensor | None = None,
        *,
        unit_offset: bool,
        want_dweight: bool,
    ) -> tuple[Tensor, Tensor | None]: ...


def _paths(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Paths:
    if triton_runs(x) and weight.dtype != torch.float64:
        from . import kernels

        # a longer row runs as plain PyTorch: no model has one, and a kernel with a loop would read it twice
        return kernels if kernels.fits(x) else eager
    return cpp if out_dtype != torch.float64 and cpp_runs(cpp.KERNELS, x, weight) else eager


def _rows(x: Tensor) -> Tensor:
    """[T H]: inside the functions, where autograd does not record it."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _shaped(y_TH: Tensor, like: Tensor) -> Tensor:
    return y_TH if like.dim() == 2 else no_view(y_TH, like.shape)


class RmsNorm(torch.autograd.Function):
    """Saves its inputs and one fp32 a row; never writes to the incoming gradient, which a residual connection shares."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float, unit_offset: bool, out_dtype: torch.dtype) -> Tensor:
        x_TH = _rows(x)
        with autocast_off(x):
            y_TH, scale_T1, _ = _paths(x_TH, weight_H, out_dtype).rms_norm_forward(
                x_TH, weight_H, eps=eps, unit_offset=unit_offset, out_dtype=out_dtype
            )
        ctx.save_for_backward(x, weight_H, scale_T1)
        ctx.eps, ctx.unit_offset, ctx.out_dtype = eps, unit_offset, out_dtype
        return _shaped(y_TH, x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_H, scale_T1 = ctx.saved_tensors
        if differentiated_again():
            reference = partial(rms_norm_reference, eps=ctx.eps, unit_offset=ctx.unit_offset, out_dtype=ctx.out_dtype)
            return *reference_gradients(reference, (x, weight_H), dy), None, None, None
        with autocast_off(x):
            x_TH, dy_TH = _rows(x), _rows(dy)
            dx_TH, dweight_H = _paths(x_TH, weight_H, dy_TH.dtype).rms_norm_backward(
                x_TH, weight_H, scale_T1, dy_TH, unit_offset=ctx.unit_offset, want_dweight=ctx.needs_input_grad[1]
            )
        return dx_TH.reshape(x.shape), dweight_H, None, None, None


@checked_in_debug(RMS_NORM)
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, unit_offset: bool = False, out_dtype: torch.dtype | None = None) -> Tensor:
    """x / rms(x) * weight, in one pass; Gemma's form, x / rms(x) * (1 + weight), with unit_offset.

    x        X[*n H]   any float dtype, unchanged by autocast
    weight   W[H]      any float dtype: an fp32 weight does not widen the output
    ->       X[*n H]   or out_dtype
    inside   fp32      (fp64 when either is fp64); narrowed once, after the weight
    grads    x: X      weight: W   summed over rows in fp32
    Raises   ShapeError SH001
    """
    if weight.shape != x.shape[-1:]:
        raise ShapeError(f"weight is {list(weight.shape)} where x {list(x.shape)} needs {list(x.shape[-1:])}", code="SH001")
    if reference_runs():
        return rms_norm_reference(x, weight, eps, unit_offset=unit_offset, out_dtype=out_dtype)
    y: Tensor = applied(RmsNorm, x, weight, eps, unit_offset, out_dtype or x.dtype)
    return y


class AddRmsNorm(torch.autograd.Function):
    """Saves the sum and one fp32 a row; the sum's two gradients, by the norm and past it, leave as one."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight_H: Tensor,
        eps: float,
        unit_offset: bool,
        out_dtype: torch.dtype,
        apart: bool,
    ) -> tuple[Tensor, Tensor]:
        """apart: x and residual get a gradient tensor each; else they share one"""
        x_TH, residual_TH = _rows(x), None if residual is None else _rows(residual)
        with autocast_off(x):
            y_TH, scale_T1, total_TH = _paths(x_TH, weight_H, out_dtype).rms_norm_forward(
                x_TH, weight_H, residual_TH, eps=eps, unit_offset=unit_offset, out_dtype=out_dtype
            )
        total = x if residual is None else _shaped(total_TH, x)
        ctx.save_for_backward(total, weight_H, scale_T1)
        ctx.eps, ctx.unit_offset, ctx.out_dtype, ctx.apart = eps, unit_offset, out_dtype, apart
        ctx.set_materialize_grads(False)
        return _shaped(y_TH, x), total

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight_H, scale_T1 = ctx.saved_tensors
        needs_x, needs_residual, needs_weight = ctx.needs_input_grad[:3]
        if dy is None:
            dx, dweight_H = dtotal, None
        elif differentiated_again():
            reference = partial(rms_norm_reference, eps=ctx.eps, unit_offset=ctx.unit_offset, out_dtype=ctx.out_dtype)
            dx, dweight_H = reference_gradients(reference, (total, weight_H), dy)
            dx = dtotal if dx is None else dx if dtotal is None else dx + dtotal
        else:
            with autocast_off(total):
                total_TH, dy_TH, dtotal_TH = _rows(total), _rows(dy), None if dtotal is None else _rows(dtotal)
                dx_TH, dweight_H = _paths(total_TH, weight_H, dy_TH.dtype).rms_norm_backward(
                    total_TH, weight_H, scale_T1, dy_TH, dtotal_TH, unit_offset=ctx.unit_offset, want_dweight=needs_weight
                )
                dx = dx_TH.reshape(total.shape)
        dresidual = dx.clone() if ctx.apart and dx is not None else dx
        return dx if needs_x else None, dresidual if needs_residual else None, dweight_H, None, None, None, None


@checked_in_debug(ADD_RMS_NORM)
def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    unit_offset: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), in one pass forward and one backward; the sum has the promoted dtype of the two.

    x, residual  X[*n H]; None adds nothing: (rms_norm(x), x), for a layer whose residual goes past the norm
    ->           (normed X[*n H] or out_dtype, sum X[*n H]), each differentiable
    inside       as `rms_norm`, of the sum rounded to X
    grads        x: X   residual: X   weight: W; the sum's two gradients are added in fp32 and rounded once
    Raises       ShapeError SH001
    """
    if residual is not None and x.shape != residual.shape:
        raise ShapeError(f"x is {list(x.shape)} and residual is {list(residual.shape)}, declared one shape", code="SH001")
    if residual is not None and (residual.dtype != x.dtype or reference_runs()):
        x, residual = x + residual, None
    if weight.shape != x.shape[-1:]:
        raise ShapeError(f"weight is {list(weight.shape)} where x {list(x.shape)} needs {list(x.shape[-1:])}", code="SH001")
    if reference_runs():
        return rms_norm_reference(x, weight, eps, unit_offset=unit_offset, out_dtype=out_dtype), x
    # PyTorch lets leaves keep what they are given through a view: of one tensor, each would accumulate into the other's .grad
    apart = residual is not None and x.is_leaf and residual.is_leaf and x.requires_grad and residual.requires_grad
    y, total = applied(AddRmsNorm, x, residual, weight, eps, unit_offset, out_dtype or x.dtype, apart)
    return y, total
