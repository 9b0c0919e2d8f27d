"""Attention by the kernels that PyTorch brings for CUDA, called as operators, so that the output and its logsumexp are the op's to keep.

B batch, N query heads, M key heads, S queries and keys, D head size, T tokens of all rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .documents import Documents

aten = torch.ops.aten


def _rows(x_BNSD: Tensor, documents: Documents | None) -> Tensor:
    """[B S N D], or [T N D] where documents tell the rows apart: FlashAttention's order."""
    x_BSND = x_BNSD.transpose(1, 2)
    return x_BSND if documents is None else x_BSND.reshape(-1, *x_BSND.shape[2:])


def _heads(y: Tensor, like_BNSD: Tensor) -> Tensor:
    batch, heads, queries, depth = like_BNSD.shape
    return y.view(batch, queries, heads, depth).transpose(1, 2)


def _bounds(query: Tensor, documents: Documents | None) -> tuple[Any, ...]:
    """Of queries and keys, and the longest of each, as FlashAttention takes them."""
    if documents is None:
        return None, None, query.shape[2], query.shape[2]
    return documents.bounds, documents.bounds, documents.longest, documents.longest


def _options(window: int | None, causal: bool, scale: float) -> dict[str, Any]:
    if window is None:
        return {"scale": scale}
    # how many keys before and after a query; -1: all
    return {"scale": scale, "window_size_left": window - 1, "window_size_right": 0 if causal else -1}


def flash_forward(
    q_BNSD: Tensor, k_BMSD: Tensor, v_BMSD: Tensor, documents: Documents | None, window: int | None, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """(out, logsumexp, random state and its unused half): what `flash_backward` needs."""
    inputs = (_rows(x, documents) for x in (q_BNSD, k_BMSD, v_BMSD))
    out, lse, state, unused, _ = aten._flash_attention_forward(
        *inputs, *_bounds(q_BNSD, documents), 0.0, causal, False, **_options(window, causal, scale)
    )
    return _heads(out, q_BNSD), lse, state, unused


def flash_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: tuple[Tensor, ...], documents: Documents | None, window: int | None,
    causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    lse, *state = saved
    inputs = (_rows(x, documents) for x in (q, k, v, out))
    grads = aten._flash_attention_backward(
        _rows(dy, documents).contiguous(), *inputs, lse, *_bounds(q, documents), 0.0, causal, *state, **_options(window, causal, scale)
    )
    dq, dk, dv = (_heads(g, x) for g, x in zip(grads, (q, k, v)))
    return dq, dk, dv


def cudnn_forward(q_BNSD: Tensor, k_BMSD: Tensor, v_BMSD: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    """(out, logsumexp, seed, offset)."""
    made = aten._scaled_dot_product_cudnn_attention(q_BNSD, k_BMSD, v_BMSD, None, True, 0.0, causal, False, scale=scale)
    return made[0], made[1], made[6], made[7]


def cudnn_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: tuple[Tensor, ...], causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    lse, seed, offset = saved
    # neither a bias nor bounds: PyTorch's own backward passes tensors that are not defined
    gradients: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_cudnn_attention_backward(
        dy, q, k, v, out, lse, seed, offset, None, None, None, q.shape[2], k.shape[2], 0.0, causal, scale=scale
    )
    return gradients
