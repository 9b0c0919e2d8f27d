"""A loss with a weight a class or a token, of per-token values: shared by the op on logits and the one on hidden states. V classes.

With class weights w and smoothing s, a token's loss is (1 - s) w_y nll_y + s / V sum_v w_v nll_v + z_loss logsumexp^2, as PyTorch's
`cross_entropy(weight=, label_smoothing=)`; times the token's weight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...errors import ShapeError, UsageError
from ..autocast import wide
from .rule import LossRule


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


def weighed_losses(
    nll: Tensor, lse: Tensor | None, sum_of_logits: Callable[[Tensor], Tensor], targets: Tensor, classes: int, rule: LossRule,
    class_weights: Tensor | None, token_weights: Tensor | None,
) -> Tensor:  # fmt: skip
    """fp32[*n]: the loss of each token, its weights in it; 0 where ignored.

    lse            needed where the rule smooths or has a z-loss
    sum_of_logits  w[V] -> sum_v w_v z_v of each token, z after the scale; called where the rule smooths
    """
    ignored = targets == rule.ignore_index
    own = torch.ones_like(nll) if class_weights is None else class_weights.to(nll.dtype)[targets.masked_fill(ignored, 0).long()]
    loss = (1 - rule.label_smoothing) * own * nll
    if rule.label_smoothing:
        w_V = torch.ones(classes, dtype=nll.dtype, device=nll.device) if class_weights is None else class_weights.to(nll.dtype)
        assert lse is not None
        loss = loss + rule.label_smoothing / classes * (w_V.sum() * lse - sum_of_logits(w_V))
    if rule.z_loss:
        assert lse is not None
        loss = loss + rule.z_loss * lse**2
    loss = loss.masked_fill(ignored, 0.0)
    return loss if token_weights is None else loss * token_weights.to(loss.dtype)


def reduced(
    losses: Tensor, targets: Tensor, reduction: str, num_items: int | float | Tensor | None, class_weights: Tensor | None,
    token_weights: Tensor | None, ignore_index: int,
) -> Tensor:  # fmt: skip
    """Weighed losses to what the caller asked for: a mean divides by the weights' sum, or by num_items where given."""
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    counted = weights_of_tokens(targets, class_weights, token_weights, ignore_index).sum() if num_items is None else num_items
    return losses.sum() / counted
