"""Computes attention of bf16 or fp16 tensors in fp32, on a CPU without instructions for them, where
the C++ kernels do not support the call: other head sizes than multiples of 16 (40 in Stable
Diffusion 1.5), or a mask of floats.

PyTorch's bf16 backward of 2 x 8 heads x 256 x 64 takes 89 ms there, and 19 ms in fp32; with one
head of 1024 x 512 it takes 1022 and 73 ms (one thread of an AMD EPYC with AVX2, torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..backend import fast_autocast_off, refuse_second_derivative
from ..library import library_op
from ..widened_products import widened_call_dtype

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _widen_operands(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Casts the operands to fp32. Each query head gets its own copy of the key head that it shares."""
    shared = query.shape[1] // key.shape[1]
    key, value = key.float(), value.float()
    if shared > 1:
        key = key.repeat_interleave(shared, dim=1)
        value = value.repeat_interleave(shared, dim=1)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
    elif mask is not None:
        mask = mask.float()
    return query.float(), key, value, mask


@library_op(
    "widened_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal,"
    " float scale) -> (Tensor, Tensor)",
    fake=lambda query, *_: (
        torch.empty_like(query),
        query.new_empty(*query.shape[:3], dtype=torch.float32),
    ),
    is_product=True,
)
def _widened_attention(
    query_BNSD: Tensor,
    key_BMTD: Tensor,
    value_BMTD: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    with fast_autocast_off():
        query, key, value, mask_fp32 = _widen_operands(query_BNSD, key_BMTD, value_BMTD, mask)
        out, logsumexp = _FORWARD(query, key, value, 0.0, causal, attn_mask=mask_fp32, scale=scale)
    return out.to(query_BNSD.dtype), logsumexp


@library_op(
    "widened_attention_backward(Tensor dy, Tensor query, Tensor key, Tensor value, Tensor out,"
    " Tensor logsumexp, Tensor? mask, bool causal, float scale) -> (Tensor, Tensor, Tensor)",
    fake=lambda dy, query, key, value, *_: tuple(map(torch.empty_like, (query, key, value))),
    is_product=True,
)
def _widened_attention_backward(
    dy_BNSD: Tensor,
    query_BNSD: Tensor,
    key_BMTD: Tensor,
    value_BMTD: Tensor,
    out_BNSD: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    with fast_autocast_off():
        query, key, value, mask_fp32 = _widen_operands(query_BNSD, key_BMTD, value_BMTD, mask)
        dquery, dkey, dvalue = _BACKWARD(
            dy_BNSD.float(),
            query,
            key,
            value,
            out_BNSD.float(),
            logsumexp,
            0.0,
            causal,
            attn_mask=mask_fp32,
            scale=scale,
        )
        shared = query.shape[1] // key_BMTD.shape[1]
        if shared > 1:
            dkey, dvalue = (d.unflatten(1, (-1, shared)).sum(2) for d in (dkey, dvalue))
    dtype = query_BNSD.dtype
    return dquery.to(dtype), dkey.to(dtype), dvalue.to(dtype)


def _forward_scratch_bytes(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    """The fp32 copies of the operands and of the result."""
    shared = query.shape[1] // key.shape[1]
    return 4 * (2 * query.numel() + 2 * shared * key.numel())


def _backward_scratch_bytes(dy: Tensor, query: Tensor, key: Tensor, *_: Any) -> int:
    """The fp32 copies of the operands and of the gradients."""
    shared = query.shape[1] // key.shape[1]
    return 4 * (4 * query.numel() + 4 * shared * key.numel())


def scratch_estimators() -> dict[Any, Callable[..., int]]:
    """Returns estimators for memory plans, as in `widened_products`."""
    return {
        torch.ops.isotype.widened_attention.default: _forward_scratch_bytes,
        torch.ops.isotype.widened_attention_backward.default: _backward_scratch_bytes,
    }


class WidenedAttention(Function):
    """Attention and its gradients in fp32. query, key and value have one narrow dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
    ) -> Tensor:
        out, logsumexp = _widened_attention(query, key, value, mask, causal, scale)
        ctx.save_for_backward(query, key, value, out, logsumexp, mask)
        ctx.options = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("attention")
        gradients = _widened_attention_backward(dy, *ctx.saved_tensors, *ctx.options)
        return *gradients, None, None, None


def widened_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float | None,
) -> Tensor | None:
    """Returns the attention of these tensors with autocast's rules, computed in fp32. Returns None
    if PyTorch's attention in the dtype of the operands is to be used.

    query       F[B N S D]
    key, value  F[B M T D]   N is a multiple of M
    mask        bool or float[S T] or [B or 1, N or 1, S, T], without a gradient
    """
    if query.dim() != 4 or key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        return None
    if min(query.numel(), key.numel()) == 0 or query.shape[1] % key.shape[1]:
        return None
    dtype = widened_call_dtype(query, key, value)
    if dtype is None:
        return None
    if mask is not None:
        lengths = query.shape[2], key.shape[2]
        if causal or mask.requires_grad or mask.dim() not in (2, 4) or mask.shape[-2:] != lengths:
            return None
    if scale is None:
        scale = query.shape[-1] ** -0.5
    out: Tensor = WidenedAttention.apply(
        query.to(dtype), key.to(dtype), value.to(dtype), mask, causal, scale
    )
    return out
