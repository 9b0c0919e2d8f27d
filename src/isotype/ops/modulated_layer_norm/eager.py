"""The modulated LayerNorm and its backward as formulas: widen once, compute, narrow once. B pictures, T tokens, H hidden."""

from __future__ import annotations

import torch
from torch import Tensor

from ..autocast import narrowed, wide


def _normed(x_BTH: Tensor, dtype: torch.dtype, eps: float) -> tuple[Tensor, Tensor]:
    """(each row without its mean and with a variance of 1, what it was multiplied by)"""
    normed, _, factor = torch.native_layer_norm(x_BTH.to(dtype), (x_BTH.shape[-1],), None, None, eps)
    return normed, factor


def modulated_layer_norm_forward(x_BTH: Tensor, scale_BH: Tensor, shift_BH: Tensor, *, eps: float, out_dtype: torch.dtype) -> Tensor:
    normed, _ = _normed(x_BTH, wide(x_BTH.dtype, scale_BH.dtype), eps)
    return narrowed(normed * (1.0 + scale_BH.to(normed.dtype))[:, None] + shift_BH.to(normed.dtype)[:, None], out_dtype)


def modulated_layer_norm_backward(
    x_BTH: Tensor, scale_BH: Tensor, dy_BTH: Tensor, *, eps: float, want_modulation: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, scale and shift."""
    normed, factor = _normed(x_BTH, wide(x_BTH.dtype, scale_BH.dtype), eps)
    dy = dy_BTH.to(normed.dtype)
    g = dy * (1.0 + scale_BH.to(normed.dtype))[:, None]
    dx_BTH = (factor * (g - g.mean(-1, keepdim=True) - normed * (g * normed).mean(-1, keepdim=True))).to(x_BTH.dtype)
    if not want_modulation:
        return dx_BTH, None, None
    # summed in the wide dtype, and narrowed once
    return dx_BTH, (dy * normed).sum(1).to(scale_BH.dtype), dy.sum(1).to(scale_BH.dtype)
