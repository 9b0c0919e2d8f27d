"""Losses with a weight a class or a token, from `linear_log_probs`: logits in chunks, no kernels. T tokens, H hidden, V vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..autocast import autocast_off
from ..cross_entropy.rule import LossRule
from ..cross_entropy.weights import weighed_losses
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

    def sum_of_logits(w_V: Tensor) -> Tensor:
        with autocast_off(hidden):
            logits: Tensor = hidden.to(w_V.dtype) @ HeadOfClasses.apply(weight, w_V)
            return (logits if bias is None else logits + bias.to(w_V.dtype) @ w_V) * scale

    return weighed_losses(-values.log_probs, values.logsumexp, sum_of_logits, targets, weight.shape[0], rule, class_weights, token_weights)
