"""LayerNorm without weights, then a scale and a shift by picture, in plain PyTorch, right at fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from ..autocast import autocast_off, wide


def modulated_layer_norm_reference(
    x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    with autocast_off(x):
        h = x.to(wide(x.dtype, scale.dtype))
        centred = h - h.mean(-1, keepdim=True)
        normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        return (normed * (1.0 + scale.to(h.dtype))[:, None] + shift.to(h.dtype)[:, None]).to(out_dtype or x.dtype)
