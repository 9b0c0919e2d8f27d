"""Defines the public op `cross_entropy` and its autograd function. T tokens, V vocabulary size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backend import apply_function, arithmetic_dtype, autocast_off, refuse_second_derivative
from ..contract import OpContract
from ..library import library_op
from .rows import choose_row_kernels
from .rule import RULE, LossRule, Reduction, RuleArguments, check_reduction, check_targets

CROSS_ENTROPY = OpContract(
    "logits: F[*n V], targets: int[*n] -> fp32|fp64[...]",
    inside="fp32",
    grads={"logits": "F"},
    autocast="ignored",
)


def apply_rule(logits_TV: Tensor, rule: LossRule) -> Tensor:
    """Returns the logits in fp32 (or fp64), after scale and softcap."""
    z_TV = logits_TV.to(arithmetic_dtype(logits_TV.dtype)) * rule.logit_scale
    if rule.softcap:
        return rule.softcap * torch.tanh(z_TV / rule.softcap)
    return z_TV


def row_losses(logits_TV: Tensor, targets_T: Tensor, rule: LossRule) -> Tensor:
    """Returns the loss of each row as fp32[T]; the loss of an ignored row is 0."""
    ignored_T = targets_T == rule.ignore_index
    z_TV = apply_rule(logits_TV, rule)
    lse_T = torch.logsumexp(z_TV, -1)
    target_logit_T = z_TV.gather(
        -1, targets_T.masked_fill(ignored_T, 0).long().unsqueeze(-1)
    ).squeeze(-1)
    loss_T = (1 - rule.label_smoothing) * (lse_T - target_logit_T) + rule.z_loss * lse_T**2
    if rule.label_smoothing:
        loss_T = loss_T + rule.label_smoothing * (lse_T - z_TV.mean(-1))
    return loss_T.masked_fill(ignored_T, 0.0)


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
    """Computes `cross_entropy` in plain PyTorch, differentiated by autograd."""
    rule = LossRule.from_options(
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        logit_scale=logit_scale,
        softcap=softcap,
        z_loss=z_loss,
    )
    with autocast_off(logits):
        return reduce_losses(
            row_losses(logits, targets, rule), targets, reduction, num_items, ignore_index
        )


def _fake_forward(logits_TV: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    loss_T = logits_TV.new_empty(logits_TV.shape[0], dtype=arithmetic_dtype(logits_TV.dtype))
    return loss_T, torch.empty_like(loss_T)


@library_op(
    f"cross_entropy_forward(Tensor logits, Tensor targets, {RULE}) -> (Tensor, Tensor)",
    fake=_fake_forward,
)
def _forward(
    logits_TV: Tensor, targets_T: Tensor, ignore_index: int, factors: Sequence[float]
) -> tuple[Tensor, Tensor]:
    kernels = choose_row_kernels(logits_TV)
    results: tuple[Tensor, Tensor] = kernels.cross_entropy_forward(
        logits_TV, targets_T, LossRule.from_arguments(ignore_index, factors)
    )
    return results


def _fake_backward(logits_TV: Tensor, *_: object) -> Tensor:
    return torch.empty(logits_TV.shape, dtype=logits_TV.dtype, device=logits_TV.device)


@library_op(
    f"cross_entropy_backward(Tensor logits, Tensor targets, Tensor lse, Tensor dloss, {RULE}) ->"
    " Tensor",
    fake=_fake_backward,
)
def _backward(
    logits_TV: Tensor,
    targets_T: Tensor,
    lse_T: Tensor,
    dloss_T: Tensor,
    ignore_index: int,
    factors: Sequence[float],
) -> Tensor:
    rule = LossRule.from_arguments(ignore_index, factors)
    out_TV = torch.empty(logits_TV.shape, dtype=logits_TV.dtype, device=logits_TV.device)
    choose_row_kernels(logits_TV).cross_entropy_backward(
        logits_TV, targets_T, lse_T, dloss_T, rule, out_TV, logits_TV.shape[-1]
    )
    return out_TV


class CrossEntropy(torch.autograd.Function):
    """Computes the loss of each row. It saves the logits and one fp32 value per row, and never
    writes to the logits.

    The gradient is written to a new tensor, since other code may still read the logits. For
    example, another operation may use the logits, backward may run a second time (`retain_graph`),
    or the caller may read the logits. `linear_cross_entropy` allocates the logits itself, so it
    overwrites them with their gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, rule: RuleArguments) -> Tensor:
        loss_T, lse_T = _forward(logits_TV, targets_T, *rule)
        ctx.save_for_backward(logits_TV, targets_T, lse_T)
        ctx.rule = rule
        return loss_T

    @staticmethod
    def backward(ctx: Any, dloss_T: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("cross_entropy")
        logits_TV, targets_T, lse_T = ctx.saved_tensors
        return _backward(logits_TV, targets_T, lse_T, dloss_T, *ctx.rule), None, None


# --- the op


def reduce_losses(
    loss_T: Tensor,
    targets_T: Tensor,
    reduction: str,
    num_items: int | float | Tensor | None,
    ignore_index: int,
) -> Tensor:
    """Returns the mean or the sum of the row losses fp32[T], or the row losses themselves. Ignored
    rows have the loss 0. The function consists of PyTorch operations, so autograd computes its
    gradient.
    """
    if reduction == "none":
        return loss_T
    total = loss_T.sum()
    if reduction == "sum":
        return total
    count = (targets_T != ignore_index).sum() if num_items is None else num_items
    if isinstance(count, Tensor):
        count = count.to(total.device)
    else:
        count = total.new_full((), count)
    is_empty = count == 0
    # if every row is ignored, the mean is nan and its gradient 0, as in PyTorch. The gradient of 0
    # / 0 would be nan, and would make the weights nan
    return torch.where(is_empty, torch.nan, total / count.masked_fill(is_empty, 1).to(total))


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    logit_scale: float | None = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    num_items: int | float | Tensor | None = None,
) -> Tensor:
    """Computes the cross-entropy for a vocabulary of any size, in fp32 but without an fp32 copy of
    the logits.

    logits   F[*n V]   any float dtype; never written to
    targets  int[*n]   classes 0..V-1, or ignore_index
    ->       fp32[]    fp32[*n] with reduction="none"; fp64 for fp64 logits; autocast does not
             change the dtype
    inside   fp32      on softcap * tanh(logit_scale * logits / softcap); z_loss adds z_loss *
             logsumexp^2
    grads    logits: F
    reduction="mean" divides by the number of rows that are not ignored, or by num_items (the number
    of such rows in all micro-batches of a step).
    Raises   IsotypeError SH002 for a target out of range; DtypeError DT001, ShapeError SH001;
             UsageError
    """
    check_reduction(reduction, num_items)
    rule = LossRule.from_options(
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        logit_scale=logit_scale,
        softcap=softcap,
        z_loss=z_loss,
    )
    check_targets(targets, tuple(logits.shape[:-1]), logits.shape[-1], rule)
    targets_T = targets.reshape(-1)
    with autocast_off(logits):
        loss_T = apply_function(
            CrossEntropy, logits.reshape(-1, logits.shape[-1]), targets_T, rule.arguments
        )
        loss = reduce_losses(loss_T, targets_T, reduction, num_items, ignore_index)
    if reduction == "none":
        return loss.reshape(targets.shape)
    return loss
