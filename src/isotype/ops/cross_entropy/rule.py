"""The loss of one row, as values: shared by `cross_entropy`, `linear_cross_entropy`, their references and their kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...errors import UsageError

Reduction = Literal["mean", "sum", "none"]
# `LossRule.arguments`, as the schema of a library op has them
RULE = "int ignore_index, float[] factors"
RuleArguments = tuple[int, tuple[float, float, float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRule:
    """loss = (1 - s) nll + s mean_v(nll_v) + z lse^2, on z = softcap tanh(logit_scale x / softcap).

    Raises  UsageError for values without a meaning
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    softcap: float = 0.0  # 0 is none
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise UsageError(f"label_smoothing is {self.label_smoothing}: expected 0 to 1")
        if self.softcap < 0.0:
            raise UsageError(f"softcap is {self.softcap}: expected a positive number, or None for none")

    @classmethod
    def of(
        cls,
        *,
        ignore_index: int,
        logit_scale: float | None,
        softcap: float | None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> LossRule:
        """The rule as a caller writes it: None for no scale and no softcap."""
        return cls(
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            logit_scale=1.0 if logit_scale is None else float(logit_scale),
            softcap=0.0 if softcap is None else float(softcap),
            z_loss=z_loss,
        )

    @classmethod
    def from_arguments(cls, ignore_index: int, factors: Sequence[float]) -> LossRule:
        """The inverse of `arguments`."""
        label_smoothing, logit_scale, softcap, z_loss = factors
        return cls(ignore_index=ignore_index, label_smoothing=label_smoothing, logit_scale=logit_scale, softcap=softcap, z_loss=z_loss)

    @property
    def arguments(self) -> RuleArguments:
        """The rule as arguments of a library op, which takes only numbers and lists of numbers."""
        return self.ignore_index, (self.label_smoothing, self.logit_scale, self.softcap, self.z_loss)

    @property
    def values(self) -> tuple[int, float, float, float, float]:
        """In the order in which the C++ kernels take them."""
        return self.ignore_index, self.label_smoothing, self.logit_scale, self.softcap, self.z_loss


def reduce(loss_T: Tensor, targets_T: Tensor, reduction: str, num_items: int | float | Tensor | None, ignore_index: int) -> Tensor:
    """fp32[T] row losses (0 where ignored) to what the caller asked for; plain differentiable PyTorch."""
    if reduction == "none":
        return loss_T
    total = loss_T.sum()
    if reduction == "sum":
        return total
    count = (targets_T != ignore_index).sum() if num_items is None else num_items
    count = count.to(total.device) if isinstance(count, Tensor) else total.new_full((), count)
    empty = count == 0
    # nothing to divide by: nan, as PyTorch's; its gradient is 0, as there, where that of 0 / 0 would be nan and spoil the weights
    return torch.where(empty, torch.nan, total / count.masked_fill(empty, 1).to(total))
