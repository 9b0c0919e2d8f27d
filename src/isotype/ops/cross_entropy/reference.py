"""Cross-entropy in plain PyTorch, right at fp64. T tokens, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from ..autocast import autocast_off, wide
from .rule import LossRule, reduce


def rule_logits(logits_TV: Tensor, rule: LossRule) -> Tensor:
    """The wide logits after scale and softcap."""
    z_TV = logits_TV.to(wide(logits_TV.dtype)) * rule.logit_scale
    return rule.softcap * torch.tanh(z_TV / rule.softcap) if rule.softcap else z_TV


def row_losses(logits_TV: Tensor, targets_T: Tensor, rule: LossRule) -> Tensor:
    """fp32[T], 0 where ignored."""
    ignored_T = targets_T == rule.ignore_index
    z_TV = rule_logits(logits_TV, rule)
    lse_T = torch.logsumexp(z_TV, -1)
    picked_T = z_TV.gather(-1, targets_T.masked_fill(ignored_T, 0).long().unsqueeze(-1)).squeeze(-1)
    loss_T = (1 - rule.label_smoothing) * (lse_T - picked_T) + rule.z_loss * lse_T**2
    if rule.label_smoothing:
        loss_T = loss_T + rule.label_smoothing * (lse_T - z_TV.mean(-1))
    return loss_T.masked_fill(ignored_T, 0.0)


def loss_by_rule(logits: Tensor, targets: Tensor, rule: LossRule, reduction: str, num_items: int | float | Tensor | None) -> Tensor:
    """The loss of all rows, reduced."""
    with autocast_off(logits):
        return reduce(row_losses(logits, targets, rule), targets, reduction, num_items, rule.ignore_index)


def cross_entropy_reference(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    logit_scale: float | None = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    num_items: int | float | Tensor | None = None,
) -> Tensor:
    """What `cross_entropy` computes, differentiated by PyTorch."""
    rule = LossRule.of(ignore_index=ignore_index, label_smoothing=label_smoothing, logit_scale=logit_scale, softcap=softcap, z_loss=z_loss)
    return loss_by_rule(logits, targets, rule, reduction, num_items)
