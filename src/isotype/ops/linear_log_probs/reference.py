"""Per-token log-probabilities in plain PyTorch: all logits at once, right at fp64. T tokens, V vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autocast import autocast_off, product_dtype
from ..cross_entropy.reference import rule_logits
from ..cross_entropy.rule import LossRule


def linear_log_probs_reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    logit_scale: float | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, ...]:
    """What `linear_log_probs` computes, every output of it, differentiated by PyTorch (log_probs, entropy and logsumexp have gradients)."""
    dtype = product_dtype(hidden, weight)
    rule = LossRule.of(ignore_index=ignore_index, logit_scale=logit_scale, softcap=softcap)
    with autocast_off(hidden):
        logits = F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        z = rule_logits(logits, rule) / temperature
        ignored = targets == ignore_index
        lse = torch.logsumexp(z, -1)
        picked = z.gather(-1, targets.masked_fill(ignored, 0).long().unsqueeze(-1)).squeeze(-1)
        log_p = z - lse.unsqueeze(-1)
        # p log p is 0 where p is, also for a class masked with -inf
        p = log_p.exp()
        entropy = -(p * log_p.clamp_min(torch.finfo(z.dtype).min)).sum(-1)
        squares = torch.logsumexp(2 * log_p.detach(), -1)
        made = (picked - lse, entropy, lse, squares, z.detach().mean(-1))
        top1 = z.detach().argmax(-1).masked_fill(ignored, -1)
        return *(x.masked_fill(ignored, 0.0) for x in made), top1
