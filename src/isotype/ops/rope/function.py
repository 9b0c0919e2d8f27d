"""`rope`: the public op and its autograd function. B batch, N and M heads, S positions, D head size, R rotated pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import ShapeError
from ..applied import applied
from ..autocast import autocast_off
from ..backend import cpp_runs, differentiated_again, fused_runs, reference_runs
from ..debug import checked_in_debug
from ..library import library_op
from . import cpp, eager
from .contract import ROPE
from .reference import rope_reference


def _fake_pair(q: Tensor, k: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return cpp.like(q), cpp.like(k)


@library_op("rope_pair(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, bool back) -> (Tensor, Tensor)", fake=_fake_pair)
def _rotate_pair(q_BNSD: Tensor, k_BMSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, interleaved: bool, back: bool) -> tuple[Tensor, Tensor]:
    from . import kernels

    return kernels.rotate_pair(q_BNSD, k_BMSD, cos_BSR, sin_BSR, interleaved=interleaved, back=back)


class Rotate(torch.autograd.Function):
    """Saves only the tables: the gradient of a rotation is the inverse rotation, for derivatives of any order."""

    @staticmethod
    def forward(
        ctx: Any, q_BNSD: Tensor, k_BMSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, interleaved: bool, back: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos_BSR, sin_BSR)
        ctx.interleaved, ctx.back = interleaved, back
        return rotated(q_BNSD, k_BMSD, cos_BSR, sin_BSR, interleaved, back)

    @staticmethod
    def backward(ctx: Any, dq_BNSD: Tensor, dk_BMSD: Tensor) -> tuple[Tensor | None, ...]:
        rotation: Any = Rotate.apply if differentiated_again() else rotated
        return *rotation(dq_BNSD, dk_BMSD, *ctx.saved_tensors, ctx.interleaved, not ctx.back), None, None, None, None


def rotated(q_BNSD: Tensor, k_BMSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, interleaved: bool, back: bool) -> tuple[Tensor, Tensor]:
    with autocast_off(q_BNSD):
        if q_BNSD.dtype == k_BMSD.dtype and fused_runs(q_BNSD):
            return _rotate_pair(q_BNSD, k_BMSD, cos_BSR, sin_BSR, interleaved, back)
        q, k = (_one(x, cos_BSR, sin_BSR, interleaved, back) for x in (q_BNSD, k_BMSD))
        return q, k


def _one(x_BNSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor, interleaved: bool, back: bool) -> Tensor:
    if fused_runs(x_BNSD):
        # q and k have different dtypes: one launch for each, with no heads of the other
        return _rotate_pair(x_BNSD, x_BNSD[:, :0], cos_BSR, sin_BSR, interleaved, back)[0]
    rotate = cpp.rotate if cpp_runs(cpp.KERNELS, x_BNSD) else eager.rotate
    return rotate(x_BNSD, cos_BSR, sin_BSR, interleaved=interleaved, back=back)


@checked_in_debug(ROPE)
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, position_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q and k rotated by position, in fp32 inside; dimensions past 2R pass through.

    q             Q[B N S D]   any float dtype, unchanged by autocast
    k             K[B M S D]
    cos, sin      C[S R] or C[B S R], R pairs; C[P R] with position_ids; fp32 for positions past 256 (bf16 has 8 bits)
    position_ids  int[S] or int[B S]: rows of the tables
    ->            Q[B N S D], K[B M S D]
    grads         q: Q   k: K   (the tables have none)
    A pair is (d, d + R), or (2d, 2d + 1) when interleaved.
    Raises  ShapeError SH001
    """
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    cos, sin = (t.unsqueeze(0) if t.dim() == 2 else t for t in (cos, sin))
    for name, x in (("q", q), ("k", k)):
        if x.dim() != 4 or cos.shape != sin.shape or cos.shape[0] not in (1, x.shape[0]) or cos.shape[1] != x.shape[2]:
            raise ShapeError(f"{name} {list(x.shape)} and tables {list(cos.shape)}: expected [B N S D] and [B S R] or [S R]", code="SH001")
        if 2 * cos.shape[-1] > x.shape[-1]:
            raise ShapeError(f"{name} has {x.shape[-1]} dimensions where {cos.shape[-1]} pairs need {2 * cos.shape[-1]}", code="SH001")
    if reference_runs():
        return rope_reference(q, k, cos, sin, interleaved=interleaved)
    rotated_q, rotated_k = applied(Rotate, q, k, cos, sin, interleaved, False)
    return rotated_q, rotated_k
