"""Rotary position embedding in plain PyTorch, right at fp64. B batch, N heads, S positions, D head size, R rotated pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..autocast import autocast_off, wide


def rotate_reference(x_BNSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, interleaved: bool) -> Tensor:
    """`x` rotated by the tables; the dimensions past 2R pass through."""
    dtype = wide(x_BNSD.dtype, cos_BSR.dtype)
    cos, sin, pairs = cos_BSR.unsqueeze(1).to(dtype), sin_BSR.unsqueeze(1).to(dtype), cos_BSR.shape[-1]
    turned, rest = x_BNSD[..., : 2 * pairs].to(dtype), x_BNSD[..., 2 * pairs :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned[..., :pairs], turned[..., pairs:]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned.to(x_BNSD.dtype), rest), -1)


def rope_reference(q: Tensor, k: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    with autocast_off(q):
        return rotate_reference(q, cos_BSR, sin_BSR, interleaved), rotate_reference(k, cos_BSR, sin_BSR, interleaved)
