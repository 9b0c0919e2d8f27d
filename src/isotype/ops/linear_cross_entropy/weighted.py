"""Losses with a weight a class or a token, from `linear_log_probs`: logits in chunks, no kernels. T tokens, H hidden, V vocabulary.

With class weights w and smoothing s, a token's loss is (1 - s) w_y nll_y + s / V sum_v w_v nll_v + z_loss logsumexp^2, as PyTorch's
`cross_entropy(weight=, label_smoothing=)`; times the token's weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import ShapeError, UsageError
from ..autocast import autocast_off, wide
from ..cross_entropy.rule import LossRule
from ..linear_log_probs import linear_log_probs

_BLOCK = 2**22  # elements of the head that are wide at once


class HeadOfClasses(torch.autograd.Function):
    """sum_v w_v W_v: fp32[H], the head's rows weighed by the classes' weights; in blocks, without a wide copy of the head."""

    @staticmethod
    def forward(ctx: Any, weight_VH: Tensor, classes_V: Tensor) -> Tensor:
        ctx.save_for_backward(classes_V)
        ctx.dtype = weight_VH.dtype
        rows = max(1, _BLOCK // weight_VH.shape[1])
        total = torch.zeros(weight_VH.shape[1], dtype=classes_V.dtype, device=weight_VH.device)
        for start in range(0, weight_VH.shape[0], rows):
            total += classes_V[start : start + rows] @ weight_VH[start : start + rows].to(classes_V.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, dtotal_H: Tensor) -> tuple[Tensor, None]:
        (classes_V,) = ctx.saved_tensors
        return torch.outer(classes_V, dtotal_H).to(ctx.dtype), None


def check_weights(class_weights: Tensor | None, token_weights: Tensor | None, targets: Tensor, classes: int, rule: LossRule) -> None:
    """Raises  ShapeError SH001; UsageError for a combination that has no op"""
    if class_weights is not None and tuple(class_weights.shape) != (classes,):
        raise ShapeError(f"class_weights {list(class_weights.shape)}: expected [{classes}]", code="SH001")
    if token_weights is not None and token_weights.shape != targets.shape:
        raise ShapeError(f"token_weights {list(token_weights.shape)}: expected {list(targets.shape)}, as the targets", code="SH001")
    if class_weights is not None and class_weights.requires_grad:
        raise UsageError("class_weights requires a gradient, and gets none", fix="class_weights.detach()")
    if rule.label_smoothing and rule.softcap:
        raise UsageError("weights with label_smoothing and softcap are not available", fix="leave out one of the three")


def weights_of_tokens(targets: Tensor, class_weights: Tensor | None, token_weights: Tensor | None, ignore_index: int) -> Tensor:
    """What each token's loss counts for in a mean: float[*n], 0 where ignored."""
    ignored = targets == ignore_index
    dtype = torch.float32 if token_weights is None else wide(token_weights.dtype)
    counted = torch.ones(targets.shape, dtype=dtype, device=targets.device) if token_weights is None else token_weights.to(dtype)
    if class_weights is not None:
        counted = counted * class_weights.to(dtype)[targets.masked_fill(ignored, 0).long()]
    return counted.masked_fill(ignored, 0.0)


def weighted_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rule: LossRule, class_weights: Tensor | None,
    token_weights: Tensor | None, chunk: int | None,
) -> Tensor:  # fmt: skip
    """fp32[*n]: the loss of each token, its weights in it; 0 where ignored."""
    scale, softcap = rule.logit_scale, rule.softcap or None
    values = linear_log_probs(
        hidden, weight, targets, bias=bias, outputs=("log_probs", "logsumexp") if rule.z_loss or rule.label_smoothing else ("log_probs",),
        ignore_index=rule.ignore_index, logit_scale=scale, softcap=softcap, chunk=chunk,
    )  # fmt: skip
    assert values.log_probs is not None
    nll, lse = -values.log_probs, values.logsumexp
    ignored = targets == rule.ignore_index
    own = torch.ones_like(nll) if class_weights is None else class_weights.to(nll.dtype)[targets.masked_fill(ignored, 0).long()]
    loss = (1 - rule.label_smoothing) * own * nll
    if rule.label_smoothing:
        classes = torch.ones(weight.shape[0], dtype=nll.dtype, device=nll.device) if class_weights is None else class_weights.to(nll.dtype)
        assert lse is not None
        with autocast_off(hidden):
            logits = hidden.to(nll.dtype) @ HeadOfClasses.apply(weight, classes)
            if bias is not None:
                logits = logits + bias.to(nll.dtype) @ classes
            loss = loss + rule.label_smoothing / weight.shape[0] * (classes.sum() * lse - scale * logits)
    if rule.z_loss:
        assert lse is not None
        loss = loss + rule.z_loss * lse**2
    loss = loss.masked_fill(ignored, 0.0)
    return loss if token_weights is None else loss * token_weights.to(loss.dtype)
