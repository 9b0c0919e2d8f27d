"""RMSNorm in plain PyTorch, right at fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from ..autocast import autocast_off, wide


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, unit_offset: bool = False, out_dtype: torch.dtype | None = None
) -> Tensor:
    with autocast_off(x):
        h = x.to(wide(x.dtype, weight.dtype))
        w = weight.to(h.dtype) + 1.0 if unit_offset else weight.to(h.dtype)
        return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * w).to(out_dtype or x.dtype)
