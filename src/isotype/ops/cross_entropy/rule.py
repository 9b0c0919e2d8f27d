"""The loss of one row as values, the checks of its arguments and its reduction: shared by `cross_entropy`,
`linear_cross_entropy`, `linear_log_probs`, their references and their kernels. V classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...errors import DtypeError, IsotypeError, ShapeError, UsageError

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


# --- checks


def check_targets(targets: Tensor, rows: tuple[int, ...], classes: int, rule: LossRule) -> None:
    """Whether the targets fit logits of this shape.

    rows    the shape of the logits without their last dimension, `classes`
    Raises  DtypeError DT001, ShapeError SH001, and IsotypeError SH002 for a target out of range
    """
    if targets.dtype not in (torch.int64, torch.int32):
        raise DtypeError(f"targets are {targets.dtype}, declared int64 or int32", code="DT001", fix="targets.long()")
    if tuple(targets.shape) != rows:
        raise ShapeError(f"targets are {list(targets.shape)} where logits {[*rows, classes]} need {list(rows)}", code="SH001")
    # a fake tensor has no values
    if not isinstance(targets, FakeTensor):
        _check_range(targets, classes, rule.ignore_index)


def check_reduction(reduction: str, num_items: int | float | Tensor | None) -> None:
    """Raises  UsageError for an unknown reduction, and for a num_items without effect"""
    if reduction not in get_args(Reduction):
        raise UsageError(f"reduction is {reduction!r}: expected mean, sum or none")
    if num_items is not None and reduction != "mean":
        raise UsageError(f"num_items={num_items} has no effect with reduction={reduction!r}", fix='use reduction="mean"')


def _check_range(targets: Tensor, classes: int, ignore_index: int) -> None:
    """On a CPU the offending value is named. On a GPU, and in a compiled graph, a device-side assert keeps the check without a sync."""
    good = (targets == ignore_index) | ((targets >= 0) & (targets < classes))
    if targets.is_meta:
        return
    if torch.compiler.is_compiling() or targets.device.type != "cpu":
        torch._assert_async(good.all(), f"SH002 a target is neither ignore_index ({ignore_index}) nor in 0..{classes - 1}")
    elif not bool(good.all()):
        bad = targets[~good].flatten()
        raise IsotypeError(
            f"{bad.numel()} targets are out of range, the first is {int(bad[0])}: "
            f"expected 0..{classes - 1} or ignore_index ({ignore_index})",
            code="SH002",
            fix="compare the tokenizer's length with the head's rows, and the label mask with ignore_index",
        )


# --- reductions


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
