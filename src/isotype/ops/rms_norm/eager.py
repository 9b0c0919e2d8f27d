"""RMSNorm and its backward as formulas: widen once, compute, narrow once. T rows, H hidden."""

from __future__ import annotations

import torch
from torch import Tensor

from ..autocast import narrowed, wide


def rms_norm_forward(
    x_TH: Tensor, weight_H: Tensor, residual_TH: Tensor | None = None, *, eps: float, unit_offset: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, 1 / rms, x + residual or x itself), the second fp32[T 1]."""
    x_TH = x_TH if residual_TH is None else x_TH + residual_TH
    x = x_TH.to(wide(x_TH.dtype, weight_H.dtype))
    w = weight_H.to(x.dtype) + 1.0 if unit_offset else weight_H.to(x.dtype)
    scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    return narrowed(x * scale * w, out_dtype), scale, x_TH


def dx_formula(
    x_TH: Tensor, weight_H: Tensor, scale_T1: Tensor, dy_TH: Tensor, more_TH: Tensor | None = None, *, unit_offset: bool
) -> Tensor:
    wide_dtype = scale_T1.dtype
    w = weight_H.to(wide_dtype) + 1.0 if unit_offset else weight_H.to(wide_dtype)
    normed = x_TH.to(wide_dtype) * scale_T1
    g = dy_TH.to(wide_dtype) * w
    own = scale_T1 * (g - normed * (g * normed).mean(-1, keepdim=True))
    return (own if more_TH is None else own + more_TH.to(wide_dtype)).to(x_TH.dtype)


def dweight_formula(x_TH: Tensor, weight_H: Tensor, scale_T1: Tensor, dy_TH: Tensor) -> Tensor:
    # summed in the wide dtype, and narrowed once
    return (dy_TH.to(scale_T1.dtype) * (x_TH.to(scale_T1.dtype) * scale_T1)).sum(0).to(weight_H.dtype)


def rms_norm_backward(
    x_TH: Tensor,
    weight_H: Tensor,
    scale_T1: Tensor,
    dy_TH: Tensor,
    more_TH: Tensor | None = None,
    *,
    unit_offset: bool,
    want_dweight: bool,
) -> tuple[Tensor, Tensor | None]:
    dx_TH = dx_formula(x_TH, weight_H, scale_T1, dy_TH, more_TH, unit_offset=unit_offset)
    return dx_TH, dweight_formula(x_TH, weight_H, scale_T1, dy_TH) if want_dweight else None
