"""Compares the weights of two checkpoints, after dequantisation and renaming, one weight at a time.

Two files of the same dtype are the same if all values are equal. If the dtypes differ, or if the
weights of one checkpoint are computed from a base and an adapter, differences within the rounding
of the narrower dtype are allowed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import UsageError
from ...wording import align_columns, format_number, format_percent, list_names, pluralise
from ..verify.tensors import (
    TENSOR_ROUNDING,
    ChangeShare,
    cast_to_merge,
    has_change,
    rounding_limits,
)
from ..verify.written_model import WrittenTensor
from .checkpoint import open_checkpoint
from .dense import DenseWeights, open_two

_FP32_ERROR = 1e-5  # rounding of fp32 sums, relative to the largest value
_MAX_ROWS = 20
# values that are a constant times the other side's: their cosine is at least this
_SCALED_COSINE = 0.99
_SCALED_FACTOR = 0.02  # and the constant differs from 1 by at least this
_NARROW = {"F16": "fp16", "BF16": "bf16"}  # kind of a tensor with 16 bits -> its dtype


@dataclass(frozen=True)
class WeightDifference:
    """A weight that differs.

    kinds     its dtypes in the two checkpoints
    largest   the largest absolute difference
    relative  the root mean square of the difference, relative to that of the second checkpoint
    share     the share of values that differ by more than the rounding
    remark    what else is known about the difference
    """

    name: str
    kinds: tuple[str, str]
    largest: float | None = None
    relative: float | None = None
    share: float | None = None
    remark: str = ""


@dataclass
class CheckpointComparison:
    """Contains the result of comparing two checkpoints.

    first, second   the labels of the two checkpoints
    equal, rounded  the number of weights whose values are equal, and the number of weights whose
                    values differ only by the rounding of their dtypes
    only_first, only_second
                    the names of weights that one checkpoint does not have
    skipped         name of a weight -> the reason why it was not compared
    kept            the share of an adapter's change that the other checkpoint contains; None
                    without an adapter
    expected        the share that the weights with the change still contain after rounding to the
                    dtype of the other checkpoint
    """

    first: str
    second: str
    equal: int = 0
    rounded: int = 0
    differences: list[WeightDifference] = field(default_factory=list)
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    kept: float | None = None
    expected: float | None = None

    @property
    def compared_count(self) -> int:
        return self.equal + self.rounded + len(self.differences)

    @property
    def has_change(self) -> bool:
        """Returns False if the other checkpoint contains only a small share of an adapter's change."""
        return has_change(self.kept, self.expected)

    @property
    def is_same(self) -> bool:
        return not (self.differences or self.only_first or self.only_second) and self.has_change

    def to_json(self) -> dict[str, Any]:
        return {"is_same": self.is_same, **asdict(self)}

    def lines(self) -> list[str]:
        """Returns the report."""
        lines = [
            f"first         {self.first}",
            f"second        {self.second}",
            f"weights       {self.compared_count:,} compared: {self.equal:,} equal,"
            f" {self.rounded:,} within the rounding of their dtypes,"
            f" {len(self.differences):,} different",
        ]
        for label, names in (("only first", self.only_first), ("only second", self.only_second)):
            if names:
                lines.append(f"{label:<14}{len(names):,}: {list_names(names, max_names=4)}")
        if self.skipped:
            name, reason = next(iter(self.skipped.items()))
            lines.append(f"not compared  {len(self.skipped):,}: {name} ({reason}), ...")
        if self.kept is not None:
            lines.append(f"adapter       {_describe_kept(self.kept, self.expected)}")
        if self.differences:
            lines += ["", *_difference_table(self.differences)]
        return [*lines, "", f"result        {self._describe_result()}"]

    def _describe_result(self) -> str:
        if self.is_same:
            return "the same, within the rounding" if self.rounded else "the same"
        if not self.has_change:
            return "not the same: the adapter is not in the weights"
        count = len(self.differences) + len(self.only_first) + len(self.only_second)
        return f"not the same: {pluralise(count, 'weight')}"


def _describe_kept(kept: float, expected: float | None) -> str:
    text = f"{format_percent(max(0.0, kept))} of its change is in the weights"
    if expected is None or expected > 0.999:
        return text
    return f"{text}; after the rounding, {format_percent(expected)} can be"


def _difference_table(differences: list[WeightDifference]) -> list[str]:
    worst = sorted(differences, key=lambda d: -(d.relative if d.relative is not None else 2.0))
    rows = [("max abs", "relative", "values", "dtypes", "weight", "")]
    for difference in worst[:_MAX_ROWS]:
        largest = "" if difference.largest is None else format_number(difference.largest)
        relative = "" if difference.relative is None else format_number(difference.relative)
        share = "" if difference.share is None else format_percent(difference.share)
        kinds = " ".join(dict.fromkeys(difference.kinds))
        rows.append((largest, relative, share, kinds, difference.name, difference.remark))
    lines = align_columns(rows, right_aligned=(0, 1, 2))
    if len(worst) > _MAX_ROWS:
        lines.append(f"... {len(worst) - _MAX_ROWS} more (--json lists them)")
    return lines


@torch.no_grad()
def compare_checkpoints(
    first_path: Path, second_path: Path, base: Path | None = None
) -> CheckpointComparison:
    """Compares two folders or files.

    base    the base model of an adapter, in place of the one in adapter_config.json
    Raises  UsageError for damaged files, and for checkpoints that cannot be compared
    """
    first, second = open_two(open_checkpoint(first_path), open_checkpoint(second_path), base)
    comparison = CheckpointComparison(first.label, second.label)
    comparison.skipped = {**first.skipped, **second.skipped}
    change = _AdapterChange(first, second)
    for name in dict.fromkeys([*first.tensors, *second.tensors]):
        pair = first.find(name), second.find(name)
        skipped_name = name.removesuffix(".weight")
        if skipped_name in comparison.skipped or name in comparison.skipped:
            continue
        if pair[0] is None:
            comparison.only_second.append(name)
        elif pair[1] is None:
            comparison.only_first.append(name)
        else:
            _compare_weight(comparison, name, (pair[0], pair[1]), change)
    if not comparison.compared_count:
        raise UsageError(
            f"{first_path} and {second_path} have no weight of the same name",
            fix="two checkpoints of the same architecture",
        )
    comparison.kept = change.share.kept
    comparison.expected = change.share.expected
    return comparison


class _AdapterChange:
    """Measures which share of an adapter's change the weights of the other checkpoint contain."""

    def __init__(self, first: DenseWeights, second: DenseWeights) -> None:
        self.computed = first.computed | second.computed
        self.adapted = next((side for side in (first, second) if side.changes), None)
        self.other_index = 1 if self.adapted is first else 0
        self.share = ChangeShare()

    def add(
        self, name: str, values: tuple[Tensor, Tensor], kinds: tuple[str, str]
    ) -> Tensor | None:
        """Adds a weight to the sums. If merging in the dtype of the other checkpoint rounds the
        base's values, returns these values before the rounding; otherwise returns None.
        """
        if self.adapted is None or self.adapted.base is None:
            return None
        read_change = self.adapted.changes.get(name)
        base = self.adapted.base.find(name)
        if read_change is None or base is None:
            return None
        base_value = base.read()
        other = values[self.other_index]
        merged = values[1 - self.other_index]
        narrow = _NARROW.get(kinds[self.other_index])
        rounded = merged if narrow is None else cast_to_merge(merged, narrow)
        self.share.add(read_change(), other - base_value, rounded - base_value)
        is_rounded = narrow is not None and base.kind != kinds[self.other_index]
        return base_value if is_rounded else None


def _compare_weight(
    comparison: CheckpointComparison,
    name: str,
    tensors: tuple[WrittenTensor, WrittenTensor],
    change: _AdapterChange,
) -> None:
    kinds = (tensors[0].kind, tensors[1].kind)
    if tensors[0].shape != tensors[1].shape:
        remark = f"{list(tensors[0].shape)} and {list(tensors[1].shape)}"
        comparison.differences.append(WeightDifference(name, kinds, remark=remark))
        return
    try:
        values = (tensors[0].read(), tensors[1].read())
    except UsageError as error:
        comparison.differences.append(WeightDifference(name, kinds, remark=error.message))
        return
    rounded_base = change.add(name, values, kinds)
    if torch.equal(*values):
        comparison.equal += 1
        return
    is_computed = name in change.computed
    difference = _measure_difference(name, kinds, values, rounded_base, is_computed=is_computed)
    if difference is None:
        comparison.rounded += 1
    else:
        comparison.differences.append(difference)


def _measure_difference(
    name: str,
    kinds: tuple[str, str],
    values: tuple[Tensor, Tensor],
    rounded_base: Tensor | None,
    *,
    is_computed: bool,
) -> WeightDifference | None:
    """Returns the difference of two weights; None if it is within the rounding.

    rounded_base  the base's weight, if a merge may have rounded it before it added the change
    """
    first, second = values
    bad = [int((~value.isfinite()).sum()) for value in values]
    if any(bad):
        remark = f"{bad[0]} and {bad[1]} values are not finite"
        same_places = torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)
        return None if same_places else WeightDifference(name, kinds, remark=remark)
    error = (first - second).abs()
    size = float(second.double().square().mean().sqrt())
    relative = float(error.double().square().mean().sqrt()) / size if size else float("inf")
    if kinds[0] == kinds[1] and not is_computed:
        is_off = error > 0
    elif any(kind in TENSOR_ROUNDING for kind in kinds):
        if relative <= sum(TENSOR_ROUNDING.get(kind, 0.0) for kind in kinds):
            return None
        is_off = error > 0
    else:
        limits = _sum_rounding_limits(kinds, second)
        if is_computed:
            limits = limits + _FP32_ERROR * second.abs().amax()
        if rounded_base is not None:
            limits = limits + _sum_rounding_limits(kinds, rounded_base)
        is_off = error > limits
    if not is_off.any():
        return None
    return WeightDifference(
        name,
        kinds,
        largest=float(error.max()),
        relative=relative,
        share=float(is_off.double().mean()),
        remark=_describe_factor(first, second),
    )


def _sum_rounding_limits(kinds: tuple[str, str], value: Tensor) -> Tensor:
    """Returns the largest error that two roundings of these values can make."""
    return rounding_limits(kinds[0], "fp32", value) + rounding_limits(kinds[1], "fp32", value)


def _describe_factor(first: Tensor, second: Tensor) -> str:
    """Returns a text if the first weight is a constant times the second; "" if not. This is the case
    if one program did not apply a scale.
    """
    a = first.double().flatten()
    b = second.double().flatten()
    norms = a.norm() * b.norm()
    if not norms:
        return ""
    product = a @ b
    factor = float(product / b.square().sum())
    if float(product / norms) < _SCALED_COSINE or abs(factor - 1) < _SCALED_FACTOR:
        return ""
    return f"{factor:.3g} times the second"
