"""What `cross_entropy` and `linear_cross_entropy` check of the arguments they share, before either computes."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...errors import DtypeError, IsotypeError, ShapeError, UsageError
from ..backend import reference_runs
from .rule import LossRule, Reduction


def check_targets(targets: Tensor, rows: tuple[int, ...], classes: int, rule: LossRule) -> None:
    """Whether the targets fit logits of this shape.

    rows    the shape of the logits without their last dimension, `classes`
    Raises  DtypeError DT001, ShapeError SH001, and IsotypeError SH002 for a target out of range
    """
    if targets.dtype not in (torch.int64, torch.int32):
        raise DtypeError(f"targets are {targets.dtype}, declared int64 or int32", code="DT001", fix="targets.long()")
    if tuple(targets.shape) != rows:
        raise ShapeError(f"targets are {list(targets.shape)} where logits {[*rows, classes]} need {list(rows)}", code="SH001")
    if not (reference_runs() or isinstance(targets, FakeTensor)):
        # values cannot be looked at under a transform such as vmap, and a fake tensor has none
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
