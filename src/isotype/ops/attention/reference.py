"""Attention in plain PyTorch, right at fp64. B batch, N query heads, M key heads, S queries, T keys, D head size."""

from __future__ import annotations

import torch
from torch import Tensor

from ..autocast import autocast_off, wide


def in_window(allowed_ST: Tensor, window: int) -> Tensor:
    """`allowed` without the keys that lie `window` or more before their query; those after it stay as they are."""
    return allowed_ST.triu(1 - window)


def attention_reference(
    query_BNSD: Tensor,
    key_BMTD: Tensor,
    value_BMTD: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    with autocast_off(query_BNSD):
        dtype = wide(query_BNSD.dtype)
        shared = query_BNSD.shape[1] // key_BMTD.shape[1]
        key_BNTD, value_BNTD = (t.to(dtype).repeat_interleave(shared, 1) for t in (key_BMTD, value_BMTD))
        score_BNST = query_BNSD.to(dtype) @ key_BNTD.transpose(-1, -2) * (query_BNSD.shape[-1] ** -0.5 if scale is None else scale)
        if softcap is not None:
            score_BNST = softcap * torch.tanh(score_BNST / softcap)
        allowed = torch.ones(score_BNST.shape[-2:], dtype=torch.bool, device=query_BNSD.device)
        allowed = allowed.tril() if causal else allowed
        allowed = allowed if window is None else in_window(allowed, window)
        allowed = allowed if mask is None else allowed & mask
        share_BNST = score_BNST.masked_fill(~allowed, -torch.inf).softmax(-1)
        # a query without any key gets zeros
        share_BNST = share_BNST.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
        return (share_BNST @ value_BNTD).to(query_BNSD.dtype)
