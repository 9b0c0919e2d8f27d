"""`cross_entropy` with weights of classes or tokens: the op's own row losses, weighed. T tokens, V vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..autocast import wide
from .eager import blocks
from .rule import LossRule
from .weights import weighed_losses


class SumOfLogits(torch.autograd.Function):
    """fp32[T]: sum_v w_v x_v of each row, in blocks of rows, without a wide copy of the logits."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, w_V: Tensor) -> Tensor:
        ctx.save_for_backward(w_V)
        ctx.dtype = logits_TV.dtype
        made_T = torch.empty(logits_TV.shape[0], dtype=w_V.dtype, device=logits_TV.device)
        for rows in blocks(logits_TV.shape[0], logits_TV.shape[1], logits_TV.device):
            # a class of weight 0 may be masked with -inf
            made_T[rows] = logits_TV[rows].to(w_V.dtype).masked_fill(w_V == 0, 0.0) @ w_V
        return made_T

    @staticmethod
    def backward(ctx: Any, dmade_T: Tensor) -> tuple[Tensor, None]:
        (w_V,) = ctx.saved_tensors
        return torch.outer(dmade_T, w_V).to(ctx.dtype), None


def weighted_losses(
    logits_TV: Tensor, row_losses_T: Tensor, targets_T: Tensor, rule: LossRule, class_weights: Tensor | None, token_weights_T: Tensor | None
) -> Tensor:
    """fp32[T]: the loss of each token, its weights in it; 0 where ignored.

    row_losses_T  of the rule without smoothing and z-loss: the negative log-probability
    """
    fp32 = wide(logits_TV.dtype)
    lse_T = None
    if rule.label_smoothing or rule.z_loss:
        classes_T = targets_T.masked_fill(targets_T == rule.ignore_index, 0).long()
        picked_T = logits_TV.gather(-1, classes_T.unsqueeze(-1)).squeeze(-1).to(fp32) * rule.logit_scale
        lse_T = row_losses_T + (rule.softcap * torch.tanh(picked_T / rule.softcap) if rule.softcap else picked_T)

    def sum_of_logits(w_V: Tensor) -> Tensor:
        made: Tensor = SumOfLogits.apply(logits_TV, w_V)
        return made * rule.logit_scale

    return weighed_losses(row_losses_T, lse_T, sum_of_logits, targets_T, logits_TV.shape[-1], rule, class_weights, token_weights_T)
