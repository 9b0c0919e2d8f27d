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
from .attempt import Fault, Outcome, attempt, exact, fault, method_at_fault, plain_functions
from .locate import locate
from .samples import LOW, PARAM, Sample, Setting, Subject, lengthened

SLACK = 4.0  # how many times worse than the yardstick a result may be
REORDERED = 16  # steps of the dtype by which another order of additions may change a result


@dataclass(frozen=True)
class Excess:
    """A result whose error is larger than allowed. Errors are relative to the truth's norm."""

    result: str
    error: float
    excused: float
    yardstick: str


@dataclass
class Numerics:
    """Errors of one subject on one sample; truths and yardsticks are computed once for each dtype
    combination.
    """

    subject: Subject
    plain: Subject | None
    sample: Sample
    inside_fp32: bool = False
    _truths: dict[Any, dict[str, Tensor]] = field(default_factory=dict)

    def on(self, sample: Sample) -> Numerics:
        """The same subject on another sample."""
        return Numerics(self.subject, self.plain, sample, self.inside_fp32)

    def truth(self, setting: Setting) -> dict[str, Tensor]:
        """What the reference, or the subject itself, gives in fp64; in fp32 where it refuses that."""
        for wide in () if setting.dtypes in self._truths else (torch.float64, torch.float32):
            around = exact if wide == torch.float64 else nullcontext
            outcome = attempt(
                self.plain or self.subject, self.sample, setting, exact=wide, around=around
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
    def twin_agrees(self) -> bool:
        """Whether the subject is made of hand-written Functions whose forward autograd can
        differentiate to the same gradients.
        """
        wide = torch.float64
        setting = Setting(None)
        own = attempt(self.subject, self.sample, setting, exact=wide, around=exact).results()
        run = attempt(self.subject, self.sample, setting, exact=wide, around=_exact_twin)
        twin = run.results()
        return (
            run.ran
            and not run.functions
            and set(twin) == set(own)
            and all(_agree(twin[n], own[n]) for n in own)
        )

    def measure(self, outcome: Outcome, setting: Setting) -> tuple[dict[str, float], list[Excess]]:
        """Relative error of each result, and those in excess."""
        truth = self.truth(setting)
        yardstick, label = self._yardstick(setting)
        unit = torch.finfo(setting.lowest(self.sample)).eps / 2
        errors = dict[str, float]()
        excesses = []
        for result, given in outcome.results().items():
            if result not in truth or truth[result].shape != given.shape:
                continue
            exactly = truth[result]
            size = _norm(truth[result])
            distance = _distance(given, exactly)
            errors[result] = distance / size if size else float(distance > 0)
            if result in yardstick:
                rounding = max(unit, torch.finfo(given.dtype).eps / 2)
                allowed = SLACK * max(_distance(yardstick[result], exactly), rounding * size)
                if distance > allowed:
                    excesses.append(
                        Excess(result, errors[result], allowed / size if size else 0.0, label)
                    )
        return errors, excesses

    def alike(
        self,
        left: Tensor | None,
        right: Tensor | None,
        setting: Setting,
        usual: Tensor | None = None,
    ) -> bool:
        """Equal but for the order of additions.

        usual  the same result where it is of its usual size, should `right` be nothing but rounding
               errors
        """
        if left is None or right is None:
            return (left is None) == (right is None)
        if left.shape != right.shape:
            return False
        distance = _distance(left, right)
        size = max(_norm(right), _norm(usual) if usual is not None else 0.0)
        return distance <= REORDERED * torch.finfo(setting.lowest(self.sample)).eps * size

    def _yardstick(self, setting: Setting) -> tuple[dict[str, Tensor], str]:
        if self.plain is not None and self.inside_fp32:
            outcome = attempt(self.plain, self.sample, Setting(setting.dtypes), exact=torch.float32)
            label = "the reference in fp32, rounded once"
        elif self.plain is not None:
            outcome = attempt(self.plain, self.sample, setting)
            label = "the reference at the same dtypes"
        elif self.twin_agrees:
            outcome = attempt(self.subject, self.sample, setting, around=plain_functions)
            label = "plain PyTorch running the same forward"
        else:
            return {}, ""
        if outcome.ran and (self.plain is not None or not outcome.functions):
            return (outcome.results(), label)
        return ({}, label)


@contextmanager
def _exact_twin() -> Iterator[None]:
    with exact(), plain_functions():
        yield


def _agree(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and _distance(left, right) <= 1e-5 * _norm(right) + 1e-12


def _norm(t: Tensor) -> float:
    finite = t.detach().double()
    return float(finite[torch.isfinite(finite)].norm())


def _distance(given: Tensor, exactly: Tensor) -> float:
    """Norm of the difference where the truth is finite; infinite where the result is not."""
    given = given.detach().double()
    exactly = exactly.detach().double()
    finite = torch.isfinite(exactly)
    difference = (given - exactly)[finite]
    if not bool(torch.isfinite(difference).all()):
        return float("inf")
    return float(difference.norm())


def percent(value: float) -> str:
    return "not finite" if value == float("inf") else f"{value:.2g}"


# rows tried first, and at most
SOME = 512
LONG = 4096
LARGEST = 8_000_000  # numbers of a lengthened sample
# relative error of fp32 sums that orders of addition account for
ORDER = 64 * torch.finfo(torch.float32).eps


def inexact(outcome: Outcome, setting: Setting, numerics: Numerics) -> list[Fault]:
    """AC006 for the worst excess of one run."""
    _, excesses = numerics.measure(outcome, setting)
    if not excesses:
        return []
    worst = _worst(excesses)
    if worst.error < ORDER and setting.lowest(numerics.sample) == torch.float32:
        return []  # the order of addition does not matter here, only that the sum is fp32
    return [_finding("AC006", worst, outcome, setting, numerics.subject, numerics.sample)]


def long_sums(numerics: Numerics, setting: Setting) -> tuple[list[Fault], str | None]:
    """AC007: what only shows at thousands of rows; and why it could not be looked at, if so."""
    subject = numerics.subject
    sample = numerics.sample
    short = attempt(subject, sample, setting)
    some = lengthened(sample, SOME)
    if not short.ran or some is None:
        return [], None
    grown = some
    outcome = attempt(subject, some, setting)
    # a result of rows times rows (weights that look like rows, attention) costs too much at
    # thousands
    if outcome.ran and _results(outcome) * _rows(sample) <= 1.5 * _results(short) * _rows(some):
        numbers = sum(some.tensor(s).numel() for s in some.slots)
        grown = lengthened(sample, max(SOME, min(LONG, LARGEST * SOME // max(1, numbers)))) or some
        outcome = attempt(subject, grown, setting)
    if not outcome.ran:
        # a function may well have a fixed number of rows: nothing to say of that
        return (
            [],
            f"long reductions: the function refuses its inputs lengthened to {_rows(grown)} rows",
        )
    before, known = numerics.measure(short, setting)
    _, found = numerics.on(grown).measure(outcome, setting)
    excesses = [e for e in found if e.result not in {x.result for x in known}]
    if not excesses:
        return [], None
    worst = _worst(excesses)
    key, finding = _finding("AC007", worst, outcome, setting, subject, grown)
    length = (
        f"relative error {percent(before.get(worst.result, 0.0))} as given, {percent(worst.error)}"
        f" at {_rows(grown)} rows"
    )
    return [(key, replace(finding, details=(("length", length), *finding.details)))], None


def _worst(excesses: list[Excess]) -> Excess:
    return max(excesses, key=lambda e: e.error / max(e.excused, 1e-30))


def _rows(sample: Sample) -> int:
    return next((sample.tensor(s).shape[0] for s in sample.slots if sample.tensor(s).dim()), 1)


def _results(outcome: Outcome) -> int:
    return sum(t.numel() for t in outcome.values)


def _finding(
    code: str, excess: Excess, outcome: Outcome, setting: Setting, subject: Subject, sample: Sample
) -> Fault:
    culprit = locate(subject, sample, setting, long_sum=code == "AC007")
    stage = "backward" if excess.result.startswith("gradient") else "forward"
    place = culprit.place if culprit else method_at_fault(subject, outcome, stage)
    if culprit and culprit.dtype is not None:
        low = name(str(culprit.dtype))
    else:
        low = name(str(setting.lowest(sample)))
    details = [
        (
            "error",
            (
                f"{percent(excess.error)} of its norm; {percent(excess.excused)} is excused by"
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
                    f"relative error {percent(culprit.before)} before this operator"
                    f" ({culprit.operator}), {percent(culprit.after)} after"
                ),
            )
        )
    long = code == "AC007"
    adds = bool(culprit and culprit.accumulates)
    if place.file:
        place = place
    else:
        place = Place(file=subject.place.file, line=subject.place.line, symbol=place.symbol)
    key, finding = fault(
        "AC006",
        place,
        place.symbol,
        culprit.place.line if culprit else place.line,
        details=tuple(details),
        long=long,
        result=excess.result,
        low=low,
        times=f" ({culprit.repeats} additions)" if culprit and culprit.repeats > 1 else "",
        cancels=culprit is not None and adds and culprit.after > 8 * max(culprit.before, 1e-9),
        sums=culprit is not None and adds and culprit.repeats >= 4,
        repeats=culprit.repeats if culprit else 0,
        setting=setting.describe(),
    )
    return (code, *key[1:]), replace(finding, code=code)


ROWS = 1024
# of a module: in deeper modules the rounding errors of activations no longer average out, for any
# weights
PARAMETERS = 16
COLUMNS = 8  # fewer tell little
# of the dtype's step: one rounding of values between 1 and 2 has a deviation of 0.29 steps
SHARE = 0.12
ALIKE = 0.7  # correlation of the columns' slopes between two sets of rows
SURE = 5.0  # times the rows' own noise
OTHER_WAY = 6.0  # times the median row's error


def rounded_weights(numerics: Numerics, setting: Setting) -> list[Fault]:
    """Looks at one setting in which everything is one low dtype; nothing where there are no weights
    or no rows.
    """
    subject = numerics.subject
    sample = numerics.sample
    if (
        setting.autocast is not None
        or len(sample.met(setting.by_group)) != 1
        or setting.lowest(sample) not in LOW
    ):
        return []
    if subject.module is not None and sum(1 for _ in subject.module.parameters()) > PARAMETERS:
        return []
    if not (subject.groups or any(s.group.startswith(PARAM) for s in sample.slots)):
        return []
    first = _slopes_of(numerics, setting, seed=0)
    for result, (slope, noise, dtype) in first.items():
        spread = float(slope.std())
        if spread <= SHARE * torch.finfo(dtype).eps or spread <= SURE * noise:
            continue
        # other rows: a rounding of statistics of the rows would be another one
        again = _slopes_of(numerics, setting, seed=1).get(result)
        if (
            again is not None
            and again[0].shape == slope.shape
            and float(torch.corrcoef(torch.stack([slope, again[0]]))[0, 1]) > ALIKE
        ):
            place = subject.place
            seen = setting.describe()
            words: dict[str, Any] = {
                "result": result,
                "low": name(dtype),
                "spread": spread,
                "noise": noise,
                "rows": ROWS,
                "setting": seen,
            }
            return [fault("AC022", place, place.symbol, place.line, **words)]
    return []


def _slopes_of(
    numerics: Numerics, setting: Setting, *, seed: int
) -> dict[str, tuple[Tensor, float, torch.dtype]]:
    """Of each low-precision output: the columns' slopes, the rows' noise in them, and its dtype."""
    grown = _many_rows(numerics.sample, seed)
    if grown is None:
        return {}
    outcome = attempt(numerics.subject, grown, setting, forward_only=True)
    truth = numerics.on(grown).truth(setting) if outcome.ran else {}
    found = {}
    for result, given in outcome.results().items():
        exactly = truth.get(result)
        if (
            exactly is None
            or exactly.shape != given.shape
            or given.dim() < 2
            or given.dtype not in LOW
            or given.shape[-1] < COLUMNS
        ):
            continue
        # the last state of a recurrent layer has a row a sequence
        if given.numel() // given.shape[-1] < ROWS:
            continue
        if (slopes := _slopes(given.detach().double(), exactly)) is not None:
            found[result] = (*slopes, given.dtype)
    return found


def _many_rows(sample: Sample, seed: int) -> Sample | None:
    """The rows drawn again, each number scaled by its own factor, so that no two rows round alike."""
    grown = lengthened(sample, ROWS)
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


def _slopes(given: Tensor, exactly: Tensor) -> tuple[Tensor, float] | None:
    """Each column's error regressed on its truth, and how much of that the rows' noise makes."""
    truth = exactly.flatten(0, -2)  # [rows columns]
    error = given.flatten(0, -2) - truth
    # a row that takes another way, as of a router whose two best experts are nearly equal, is off
    # by no rounding
    off = error.norm(dim=1) / truth.norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    alike = off <= OTHER_WAY * off.median()
    truth = truth[alike]
    error = error[alike]
    weight = truth.square().sum(0)
    if not (torch.isfinite(error).all() and torch.isfinite(truth).all()) or not (weight > 0).all():
        return None
    slope = (error * truth).sum(0) / weight
    left = (error - slope * truth) * truth
    return slope, float((left.square().sum(0).sqrt() / weight).median())
