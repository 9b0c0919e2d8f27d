"""Attention by the C++ kernels: bf16, rows of any stride. B batch, N query heads, M key heads, S queries, T keys, D head size."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cpp import CppKernels
from ..library import library_op

KERNELS = CppKernels(__file__, in_graphs=True, forward="apppppppf", backward="appppppppppif")
# queries and keys of a block in cpu.cpp
BLOCK = 64
# Work is shared among threads by key heads where there are as many as this, else by query heads. A constant, and not the number of threads,
# so that a sum's order never depends on the machine.
_KEY_HEADS = 16


def _adjacent(*tensors: Tensor) -> list[Tensor]:
    made: list[Tensor] = []
    for t in tensors:
        made.append(t if t.stride(-1) == 1 else t.contiguous())
    return made


def _allowed(mask: Tensor, batch: int, queries: int, keys: int) -> Tensor:
    """[B T S'] bytes, S' whole blocks: the queries of one key lie side by side, as the scores do."""
    turned = mask[:, 0].expand(mask.shape[0], queries, keys).transpose(1, 2).view(torch.uint8)
    return F.pad(turned, (0, -queries % BLOCK)).contiguous()


def _shape(q: Tensor, k: Tensor, v: Tensor, out: Tensor, dy: Tensor, allowed: Tensor | None, causal: bool) -> Any:
    """struct Shape of cpu.cpp."""
    batch, heads, queries, depth = q.shape
    masks = (0, 0) if allowed is None else (allowed.stride(0) if allowed.shape[0] > 1 else 0, allowed.stride(1))
    numbers = (batch, heads, k.shape[1], queries, k.shape[2], depth, int(causal), *masks)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *dy.stride()[:3])
    return (ctypes.c_int64 * (len(numbers) + len(strides)))(*numbers, *strides)


def _fake_forward(q_BNSD: Tensor, k_BMTD: Tensor, v_BMTD: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    batch, heads, queries, depth = q_BNSD.shape
    # positions before heads, as the output projection wants them
    out_BSND = torch.empty((batch, queries, heads, depth), dtype=q_BNSD.dtype, device=q_BNSD.device)
    return out_BSND.transpose(1, 2), torch.empty((batch, heads, queries), dtype=torch.float32, device=q_BNSD.device)


@library_op(
    "attention_forward_cpp(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale) -> (Tensor, Tensor)", fake=_fake_forward
)
def attention_forward(
    q_BNSD: Tensor, k_BMTD: Tensor, v_BMTD: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(out, the logsumexp of each query's scores, inf where it has none)."""
    out_BNSD, lse_BNS = _fake_forward(q_BNSD, k_BMTD, v_BMTD, mask, causal, scale)
    q, k, v = _adjacent(q_BNSD, k_BMTD, v_BMTD)
    batch, key_heads, keys, depth = k.shape
    allowed = None if mask is None else _allowed(mask, batch, q.shape[2], keys)
    turned = torch.empty((batch, key_heads, depth, keys + -keys % BLOCK), dtype=v.dtype)
    KERNELS("forward", _shape(q, k, v, out_BNSD, out_BNSD, allowed, causal), q, k, v, allowed, out_BNSD, lse_BNS, turned, scale)
    return out_BNSD, lse_BNS


def _fake_backward(
    q_BNSD: Tensor, k_BMTD: Tensor, v_BMTD: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, dy: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    made: list[Tensor] = []
    for t in (q_BNSD, k_BMTD, v_BMTD):
        made.append(torch.empty(t.shape, dtype=t.dtype, device=t.device))
    return made[0], made[1], made[2]


@library_op(
    "attention_backward_cpp(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor lse, Tensor dy, bool causal, float scale)"
    " -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
)
def attention_backward(
    q_BNSD: Tensor, k_BMTD: Tensor, v_BMTD: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, dy: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, dy = _adjacent(q_BNSD, k_BMTD, v_BMTD, dy)
    dq, dk, dv = _fake_backward(q, k, v, mask, out, lse, dy, causal, scale)
    batch, heads, queries, _ = q.shape
    allowed = None if mask is None else _allowed(mask, batch, queries, k.shape[2])
    parts = heads // k.shape[1] if batch * k.shape[1] < _KEY_HEADS else 1
    # of the query heads that read a key head, each has its own share of the gradients: summed here, in fp32, and narrowed once
    shares = torch.empty((2, *k.shape[:2], parts, *k.shape[2:]), dtype=torch.float32).unbind() if parts > 1 else (dk, dv)
    KERNELS("backward", _shape(q, k, v, out, dy, allowed, causal), q, k, v, allowed, out, lse, dy, dq, *shares, parts, scale)
    if parts > 1:
        dk, dv = shares[0].sum(2).to(k.dtype), shares[1].sum(2).to(k.dtype)
    return dq, dk, dv
