"""Softcapped attention on a GPU: PyTorch's flex_attention, compiled once for each kind of call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .documents import Documents


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
    softcap: float,
    documents: Documents | None,
) -> Tensor:
    """As `attention`; blocks of keys that no query of a block attends to are skipped. mask bool[B or 1, 1 or N, S, T]."""
    from torch.nn.attention.flex_attention import create_block_mask

    numbers_BS = None if documents is None else documents.numbers(query.shape[0], query.shape[2])

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        keep = q >= k if causal else q >= 0
        if window is not None:
            keep = keep & (q - k < window)
        if mask is not None:
            keep = keep & mask[b if mask.shape[0] > 1 else 0, h if mask.shape[1] > 1 else 0, q, k]
        if numbers_BS is not None:
            keep = keep & (numbers_BS[b, q] == numbers_BS[b, k])
        return keep

    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    batch = query.shape[0] if numbers_BS is not None or (mask is not None and mask.shape[0] > 1) else None
    heads = query.shape[1] if mask is not None and mask.shape[1] > 1 else None
    blocks = create_block_mask(allowed, batch, heads, query.shape[2], key.shape[2], device=query.device.type, _compile=query.is_cuda)
    run = _compiled() if query.is_cuda else _eager
    return run(query, key, value, score_mod=capped, block_mask=blocks, scale=scale, enable_gqa=query.shape[1] != key.shape[1])


def _eager(*args: Any, **kwargs: Any) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(*args, **kwargs)
