"""AC006 and AC007: results that are further from the truth than their dtypes explain. AC022: a
value made from a weight that is rounded before it is used, as in `x * (1 + weight)` in bf16 (four
norms of transformers 5.23).

The truth is the reference (or the function itself) in fp64 on the very values the narrow dtypes
hold. The allowed error is `SLACK` times that of the yardstick at the same dtypes: the reference,
else the function's plain twin, which is its own forward as ordinary differentiable PyTorch. Where
there is neither, no error is judged. No tolerance is typed anywhere else.

A weight's gradient is a sum over the rows, which may be long. Roundings of activations differ from
row to row and average out; that of a weight's own expression is the same in every row. So each
column's result is regressed on its truth over many rows: slopes that differ from column to column
by more than the rows' noise are a weight's rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...dtypes import name
from ...finding import Place
from .attempt import (
    Fault,
    Outcome,
    attempt,
    fault,
    faulty_method_location,
    fp64_arithmetic,
    plain_functions,
)
from .locate import locate
from .samples import LOW, PARAM, Sample, Setting, Subject, lengthen

SLACK = 4.0  # how many times worse than the yardstick a result may be
REORDERING_STEPS = 16  # steps of the dtype by which another order of additions may change a result


@dataclass(frozen=True)
class Excess:
    """A result whose error is larger than allowed. Errors are relative to the truth's norm."""

    result: str
    error: float
    allowed: float
    yardstick: str


@dataclass
class Numerics:
    """Errors of one subject on one sample; truths and yardsticks are computed once for each dtype
    combination.
    """

    subject: Subject
    reference: Subject | None
    sample: Sample
    inside_fp32: bool = False
    _truths: dict[Any, dict[str, Tensor]] = field(default_factory=dict)

    def with_sample(self, sample: Sample) -> Numerics:
        """The same subject on another sample."""
        return Numerics(self.subject, self.reference, sample, self.inside_fp32)

    def truth(self, setting: Setting) -> dict[str, Tensor]:
        """What the reference, or the subject itself, gives in fp64; in fp32 where it refuses that."""
        for wide in () if setting.dtypes in self._truths else (torch.float64, torch.float32):
            context = fp64_arithmetic if wide == torch.float64 else nullcontext
            outcome = attempt(
                self.reference or self.subject, self.sample, setting, widen_to=wide, context=context
            )
            if outcome.ran:
                self._truths[setting.dtypes] = {
                    n: t.detach().double() for n, t in outcome.results().items()
                }
            else:
                self._truths[setting.dtypes] = {}
            if outcome.ran:
                break
        return self._truths[setting.dtypes]

    @cached_property
    def has_plain_twin(self) -> bool:
        """Whether the subject is made of hand-written Functions whose forward autograd can
        differentiate to the same gradients.
        """
        wide = torch.float64
        setting = Setting(None)
        written = attempt(
            self.subject, self.sample, setting, widen_to=wide, context=fp64_arithmetic
        ).results()
        twin_outcome = attempt(
            self.subject, self.sample, setting, widen_to=wide, context=_exact_twin
        )
        twin = twin_outcome.results()
        return (
            twin_outcome.ran
            and not twin_outcome.functions
            and set(twin) == set(written)
            and all(_is_close(twin[n], written[n]) for n in written)
        )

    def measure(self, outcome: Outcome, setting: Setting) -> tuple[dict[str, float], list[Excess]]:
        """Relative error of each result, and those in excess."""
        truth = self.truth(setting)
        yardstick, label = self._yardstick(setting)
        unit = torch.finfo(setting.lowest(self.sample)).eps / 2
        errors = dict[str, float]()
        excesses = []
        for result, value in outcome.results().items():
            if result not in truth or truth[result].shape != value.shape:
                continue
            exact_value = truth[result]
            size = _norm(truth[result])
            distance = _distance(value, exact_value)
            errors[result] = distance / size if size else float(distance > 0)
            if result in yardstick:
                rounding = max(unit, torch.finfo(value.dtype).eps / 2)
                allowed = SLACK * max(_distance(yardstick[result], exact_value), rounding * size)
                if distance > allowed:
                    excesses.append(
                        Excess(result, errors[result], allowed / size if size else 0.0, label)
                    )
        return errors, excesses

    def equals_up_to_order(
        self,
        actual: Tensor | None,
        expected: Tensor | None,
        setting: Setting,
        typical: Tensor | None = None,
    ) -> bool:
        """Equal but for the order of additions.

        typical  the same result where it is of its usual size, should `expected` be nothing but rounding
               errors
        """
        if actual is None or expected is None:
            return (actual is None) == (expected is None)
        if actual.shape != expected.shape:
            return False
        distance = _distance(actual, expected)
        size = max(_norm(expected), _norm(typical) if typical is not None else 0.0)
        return distance <= REORDERING_STEPS * torch.finfo(setting.lowest(self.sample)).eps * size

    def _yardstick(self, setting: Setting) -> tuple[dict[str, Tensor], str]:
        if self.reference is not None and self.inside_fp32:
            outcome = attempt(
                self.reference, self.sample, Setting(setting.dtypes), widen_to=torch.float32
            )
            label = "the reference in fp32, rounded once"
        elif self.reference is not None:
            outcome = attempt(self.reference, self.sample, setting)
            label = "the reference at the same dtypes"
        elif self.has_plain_twin:
            outcome = attempt(self.subject, self.sample, setting, context=plain_functions)
            label = "plain PyTorch running the same forward"
        else:
            return {}, ""
        if outcome.ran and (self.reference is not None or not outcome.functions):
            return (outcome.results(), label)
        return ({}, label)


@contextmanager
def _exact_twin() -> Iterator[None]:
    with fp64_arithmetic(), plain_functions():
        yield


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    return (
        actual.shape == expected.shape
        and _distance(actual, expected) <= 1e-5 * _norm(expected) + 1e-12
    )


def _norm(t: Tensor) -> float:
    finite = t.detach().double()
    return float(finite[torch.isfinite(finite)].norm())


def _distance(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference where the truth is finite; infinite where the result is not."""
    actual = actual.detach().double()
    expected = expected.detach().double()
    finite = torch.isfinite(expected)
    difference = (actual - expected)[finite]
    if not bool(torch.isfinite(difference).all()):
        return float("inf")
    return float(difference.norm())


def format_error(value: float) -> str:
    return "not finite" if value == float("inf") else f"{value:.2g}"


# rows tried first, and at most
SOME_ROWS = 512
MANY_ROWS = 4096
MAX_ELEMENTS = 8_000_000  # numbers of a lengthened sample
# relative error of fp32 sums that orders of addition account for
FP32_ORDER_ERROR = 64 * torch.finfo(torch.float32).eps


def precision_faults(outcome: Outcome, setting: Setting, numerics: Numerics) -> list[Fault]:
    """AC006 for the worst excess of one run."""
    _, excesses = numerics.measure(outcome, setting)
    if not excesses:
        return []
    worst = _worst(excesses)
    if worst.error < FP32_ORDER_ERROR and setting.lowest(numerics.sample) == torch.float32:
        return []  # the order of addition does not matter here, only that the sum is fp32
    return [_precision_fault("AC006", worst, outcome, setting, numerics.subject, numerics.sample)]


def long_sum_faults(numerics: Numerics, setting: Setting) -> tuple[list[Fault], str | None]:
    """AC007: what only shows at thousands of rows; and why it could not be looked at, if so."""
    subject = numerics.subject
    sample = numerics.sample
    short = attempt(subject, sample, setting)
    lengthened = lengthen(sample, SOME_ROWS)
    if not short.ran or lengthened is None:
        return [], None
    grown = lengthened
    outcome = attempt(subject, lengthened, setting)
    # a result of rows times rows (weights that look like rows, attention) costs too much at
    # thousands
    if outcome.ran and _count_results(outcome) * _count_rows(sample) <= 1.5 * _count_results(
        short
    ) * _count_rows(lengthened):
        elements = sum(lengthened.tensor(s).numel() for s in lengthened.slots)
        grown = (
            lengthen(
                sample, max(SOME_ROWS, min(MANY_ROWS, MAX_ELEMENTS * SOME_ROWS // max(1, elements)))
            )
            or lengthened
        )
        outcome = attempt(subject, grown, setting)
    if not outcome.ran:
        # a function may well have a fixed number of rows: nothing to say of that
        return (
            [],
            f"long reductions: the function refuses its inputs lengthened to {_count_rows(grown)} rows",
        )
    short_errors, short_excesses = numerics.measure(short, setting)
    _, long_excesses = numerics.with_sample(grown).measure(outcome, setting)
    excesses = [e for e in long_excesses if e.result not in {x.result for x in short_excesses}]
    if not excesses:
        return [], None
    worst = _worst(excesses)
    key, finding = _precision_fault("AC007", worst, outcome, setting, subject, grown)
    length = (
        f"relative error {format_error(short_errors.get(worst.result, 0.0))} as given, {format_error(worst.error)}"
        f" at {_count_rows(grown)} rows"
    )
    return [(key, replace(finding, details=(("length", length), *finding.details)))], None


def _worst(excesses: list[Excess]) -> Excess:
    return max(excesses, key=lambda e: e.error / max(e.allowed, 1e-30))


def _count_rows(sample: Sample) -> int:
    return next((sample.tensor(s).shape[0] for s in sample.slots if sample.tensor(s).dim()), 1)


def _count_results(outcome: Outcome) -> int:
    return sum(t.numel() for t in outcome.values)


def _precision_fault(
    code: str, excess: Excess, outcome: Outcome, setting: Setting, subject: Subject, sample: Sample
) -> Fault:
    culprit = locate(subject, sample, setting, long_sum=code == "AC007")
    stage = "backward" if excess.result.startswith("gradient") else "forward"
    location = culprit.location if culprit else faulty_method_location(subject, outcome, stage)
    if culprit and culprit.dtype is not None:
        low_dtype = name(str(culprit.dtype))
    else:
        low_dtype = name(str(setting.lowest(sample)))
    details = [
        (
            "error",
            (
                f"{format_error(excess.error)} of its norm; {format_error(excess.allowed)} is excused by"
                f" {excess.yardstick}"
            ),
        )
    ]
    if culprit:
        details.append(("code", culprit.source))
        details.append(
            (
                "there",
                (
                    f"relative error {format_error(culprit.input_error)} before this operator"
                    f" ({culprit.operator}), {format_error(culprit.output_error)} after"
                ),
            )
        )
    is_long = code == "AC007"
    accumulates = bool(culprit and culprit.accumulates)
    if location.file:
        location = location
    else:
        location = Place(
            file=subject.location.file, line=subject.location.line, symbol=location.symbol
        )
    key, finding = fault(
        "AC006",
        location,
        location.symbol,
        culprit.location.line if culprit else location.line,
        details=tuple(details),
        long=is_long,
        result=excess.result,
        low=low_dtype,
        times=f" ({culprit.repeats} additions)" if culprit and culprit.repeats > 1 else "",
        cancels=culprit is not None
        and accumulates
        and culprit.output_error > 8 * max(culprit.input_error, 1e-9),
        sums=culprit is not None and accumulates and culprit.repeats >= 4,
        repeats=culprit.repeats if culprit else 0,
        setting=setting.describe(),
    )
    return (code, *key[1:]), replace(finding, code=code)


ROWS = 1024
# of a module: in deeper modules the rounding errors of activations no longer average out, for any
# weights
MAX_PARAMETERS = 16
MIN_COLUMNS = 8  # fewer tell little
# of the dtype's step: one rounding of values between 1 and 2 has a deviation of 0.29 steps
MIN_SPREAD = 0.12
MIN_CORRELATION = 0.7  # correlation of the columns' slopes between two sets of rows
NOISE_FACTOR = 5.0  # times the rows' own noise
OUTLIER_FACTOR = 6.0  # times the median row's error


def rounded_weight_faults(numerics: Numerics, setting: Setting) -> list[Fault]:
    """Looks at one setting in which everything is one low dtype; nothing where there are no weights
    or no rows.
    """
    subject = numerics.subject
    sample = numerics.sample
    if (
        setting.autocast is not None
        or len(sample.dtypes_in_play(setting.group_dtypes)) != 1
        or setting.lowest(sample) not in LOW
    ):
        return []
    if subject.module is not None and sum(1 for _ in subject.module.parameters()) > MAX_PARAMETERS:
        return []
    if not (subject.groups or any(s.group.startswith(PARAM) for s in sample.slots)):
        return []
    slopes = _column_slopes(numerics, setting, seed=0)
    for result, (slope, noise, dtype) in slopes.items():
        spread = float(slope.std())
        if spread <= MIN_SPREAD * torch.finfo(dtype).eps or spread <= NOISE_FACTOR * noise:
            continue
        # other rows: a rounding of statistics of the rows would be another one
        other_slopes = _column_slopes(numerics, setting, seed=1).get(result)
        if (
            other_slopes is not None
            and other_slopes[0].shape == slope.shape
            and float(torch.corrcoef(torch.stack([slope, other_slopes[0]]))[0, 1]) > MIN_CORRELATION
        ):
            location = subject.location
            setting_text = setting.describe()
            values: dict[str, Any] = {
                "result": result,
                "low": name(dtype),
                "spread": spread,
                "noise": noise,
                "rows": ROWS,
                "setting": setting_text,
            }
            return [fault("AC022", location, location.symbol, location.line, **values)]
    return []


def _column_slopes(
    numerics: Numerics, setting: Setting, *, seed: int
) -> dict[str, tuple[Tensor, float, torch.dtype]]:
    """Of each low-precision output: the columns' slopes, the rows' noise in them, and its dtype."""
    varied = _vary_rows(numerics.sample, seed)
    if varied is None:
        return {}
    outcome = attempt(numerics.subject, varied, setting, forward_only=True)
    truth = numerics.with_sample(varied).truth(setting) if outcome.ran else {}
    slopes_by_result = {}
    for result, value in outcome.results().items():
        exact_value = truth.get(result)
        if (
            exact_value is None
            or exact_value.shape != value.shape
            or value.dim() < 2
            or value.dtype not in LOW
            or value.shape[-1] < MIN_COLUMNS
        ):
            continue
        # the last state of a recurrent layer has a row a sequence
        if value.numel() // value.shape[-1] < ROWS:
            continue
        if (slopes := _regress_columns(value.detach().double(), exact_value)) is not None:
            slopes_by_result[result] = (*slopes, value.dtype)
    return slopes_by_result


def _vary_rows(sample: Sample, seed: int) -> Sample | None:
    """The rows drawn again, each number scaled by its own factor, so that no two rows round alike."""
    grown = lengthen(sample, ROWS)
    if grown is None:
        return None
    generator = torch.Generator().manual_seed(seed)
    scaled = {}
    for slot in grown.slots:
        tensor = grown.tensor(slot)
        if not slot.group.startswith(PARAM) and tensor.shape != sample.tensor(slot).shape:
            factor = 0.5 + torch.rand(tensor.shape, generator=generator)
            scaled[slot.index] = (tensor.detach().float() * factor.to(tensor.device)).to(
                tensor.dtype
            )
    return grown.with_tensors(scaled)


def _regress_columns(actual: Tensor, expected: Tensor) -> tuple[Tensor, float] | None:
    """Each column's error regressed on its truth, and how much of that the rows' noise makes."""
    truth = expected.flatten(0, -2)  # [rows columns]
    error = actual.flatten(0, -2) - truth
    # a row that takes another way, as of a router whose two best experts are nearly equal, is off
    # by no rounding
    row_errors = error.norm(dim=1) / truth.norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    is_inlier = row_errors <= OUTLIER_FACTOR * row_errors.median()
    truth = truth[is_inlier]
    error = error[is_inlier]
    weight = truth.square().sum(0)
    if not (torch.isfinite(error).all() and torch.isfinite(truth).all()) or not (weight > 0).all():
        return None
    slope = (error * truth).sum(0) / weight
    residual = (error - slope * truth) * truth
    return slope, float((residual.square().sum(0).sqrt() / weight).median())
