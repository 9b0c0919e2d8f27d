"""`attention`: the public op and its autograd function. B batch, N query heads, M key heads, S queries, T keys, D head size."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...dtypes import name
from ...errors import DtypeError, ShapeError
from ..autocast import autocast_dtype, autocast_off
from ..backend import cpp_runs, differentiated_again, reference_gradients, reference_runs
from . import cpp
from .reference import attention_reference


class Attention(torch.autograd.Function):
    """Saves query, key, value, the output, and one fp32 logsumexp a query: never a [queries x keys] matrix."""

    @staticmethod
    def forward(ctx: Any, q_BNSD: Tensor, k_BMTD: Tensor, v_BMTD: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
        with autocast_off(q_BNSD):
            out_BNSD, lse_BNS = cpp.attention_forward(q_BNSD, k_BMTD, v_BMTD, mask, causal, scale)
        ctx.save_for_backward(q_BNSD, k_BMTD, v_BMTD, mask, out_BNSD, lse_BNS)
        ctx.causal, ctx.scale = causal, scale
        return out_BNSD

    @staticmethod
    def backward(ctx: Any, dy_BNSD: Tensor) -> tuple[Tensor | None, ...]:
        q_BNSD, k_BMTD, v_BMTD, mask, out_BNSD, lse_BNS = ctx.saved_tensors
        if differentiated_again():
            again = partial(attention_reference, mask=mask, causal=ctx.causal, scale=ctx.scale)
            return *reference_gradients(again, (q_BNSD, k_BMTD, v_BMTD), dy_BNSD), None, None, None
        with autocast_off(q_BNSD):
            grads = cpp.attention_backward(q_BNSD, k_BMTD, v_BMTD, mask, out_BNSD, lse_BNS, dy_BNSD, ctx.causal, ctx.scale)
        return *grads, None, None, None


def kernels_take(dtype: torch.dtype, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the C++ kernels run on these in `dtype`: bf16 on a CPU, heads of a multiple of 16, one mask of bools for all heads."""
    (batch, _, queries, depth), keys = query.shape, key.shape[2]
    return (
        dtype == torch.bfloat16
        and key.shape == value.shape
        and depth % 16 == 0
        and min(batch, queries, keys, depth) > 0
        and (mask is None or (mask.dtype == torch.bool and mask.shape in ((batch, 1, queries, keys), (1, 1, queries, keys))))
        and cpp_runs(cpp.KERNELS, query, key, value)
    )


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Scaled dot-product attention, without a [queries x keys] matrix in memory.

    query       F[B N S D]   autocast's dtype where that is on
    key, value  F[B M T D]   N a multiple of M: query heads share key heads in order
    mask        bool[B or 1, 1 or N, S, T], true where a query attends to a key
    causal      query i attends to keys 0 to i only
    scale       of the products; 1 / sqrt(D) by default
    ->          F[B N S D]; zeros for a query that attends to no key
    inside      scores, their softmax and all sums fp32; probabilities narrowed to F before their product with value
    grads       query: F   key: F   value: F   (those of shared heads are summed in fp32)
    In bf16 on a CPU this runs C++ kernels (FlashAttention-2's recurrences, Dao 2023, with queries as vector lanes); elsewhere, and in
    other dtypes, PyTorch's scaled_dot_product_attention.
    Raises  DtypeError DT001 when the dtypes differ without autocast; ShapeError SH001
    """
    _check(query, key, value)
    cast = autocast_dtype(query)
    if cast is not None and query.dtype != torch.float64:
        query, key, value = (t.to(cast) for t in (query, key, value))
    if not query.dtype == key.dtype == value.dtype:
        raise DtypeError(
            f"query, key and value are {name(query.dtype)}, {name(key.dtype)} and {name(value.dtype)}: expected one", code="DT001"
        )
    if reference_runs():
        return attention_reference(query, key, value, mask=mask, causal=causal, scale=scale)
    if kernels_take(query.dtype, query, key, value, mask):
        out: Tensor = Attention.apply(query, key, value, mask, causal, query.shape[-1] ** -0.5 if scale is None else scale)
        return out
    if mask is not None and causal:
        mask, causal = mask & torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril(), False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if any(t.dim() != 4 for t in (query, key, value)) or key.shape != value.shape:
        raise ShapeError(f"{shapes}: expected [B N S D], [B M T D] and [B M T D]", code="SH001")
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ShapeError(f"{shapes}: batch and head size must be the same", code="SH001")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ShapeError(f"{shapes}: {query.shape[1]} query heads cannot share {key.shape[1]} key heads evenly", code="SH001")
