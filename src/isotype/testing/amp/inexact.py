"""The findings AC006 and AC007: the errors that `numerics` measured, with the line that lost the precision.

A sum is long over the rows (a weight's gradient) or over the columns of a row (a norm's mean of squares, a softmax's total): both grow.
What a long run costs is counted and not timed, so that the result is the same on every machine.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from ...dtypes import name
from ...finding import Finding, Place, Severity
from ...observe.operators import Operator
from ...observe.tape import Tape
from .attempt import Fault, Outcome, attempt, method_at_fault
from .locate import Culprit, locate, running_sums
from .numerics import Excess, Numerics, percent
from .samples import Sample, Setting, lengthened, widened
from .subjects import Subject

CALL, NUMBER, OPERATION = 2e-7, 2e-9, 2e-10  # seconds that a call in Python, a number written and an operation take on a nominal machine


@dataclass
class Cost:
    """calls: of Python functions; numbers: written by operators; operations: of products, as `flop_counter` counts them."""

    calls: int = 0
    numbers: int = 0
    operations: int = 0

    @property
    def seconds(self) -> float:
        """On a nominal machine."""
        return CALL * self.calls + NUMBER * self.numbers + OPERATION * self.operations


@contextmanager
def counted() -> Iterator[Cost]:
    """Counts what runs inside."""
    cost = Cost()
    former = sys.getprofile()

    def count(frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "c_call"):
            cost.calls += 1

    def ran(op: Operator, args: tuple, kwargs: dict) -> Any:
        out = op(*args, **kwargs)
        cost.numbers += sum(t.numel() for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
        if (operations := flop_registry.get(op.func.overloadpacket)) is not None:
            cost.operations += int(operations(*args, **kwargs, out_val=out))
        return out

    with Tape(ran):
        sys.setprofile(count)
        try:
            yield cost
        finally:
            sys.setprofile(former)


GROWTH = 3.0  # an error that grows by this factor with the number of rows is a sum in low precision
STABLE = (
    "rearrange it into a stable form, as PyTorch's own have (logsigmoid, log_softmax, binary_cross_entropy_with_logits, expm1, log1p), "
    "computed in fp32"
)
SOME, LONG = 512, 4096  # rows tried first, and at most
# what the long runs of one setting may cost, in seconds of a nominal machine, and how many exact runs they are worth
BUDGET, RUNS = 3.0, 6
ORDER = 64 * torch.finfo(torch.float32).eps  # relative error of fp32 sums that orders of addition account for
MANY = 16  # additions into one low-precision tensor


@dataclass(frozen=True)
class Axis:
    """A direction in which a sample can grow: its word, how, its present extent, and how many numbers are too many."""

    word: str
    grow: Callable[[Sample, int], Sample | None]
    extent: Callable[[Sample], int]
    largest: int


def _rows(sample: Sample) -> int:
    return next((sample.tensor(s).shape[0] for s in sample.slots if sample.tensor(s).dim()), 1)


def _columns(sample: Sample) -> int:
    return next((sample.tensor(s).shape[-1] for s in sample.slots if sample.tensor(s).dim()), 1)


ROWS, COLUMNS = Axis("rows", lengthened, _rows, 8_000_000), Axis("columns", widened, _columns, 1_000_000)


def inexact(outcome: Outcome, setting: Setting, numerics: Numerics) -> list[Fault]:
    """AC006 for the worst excess of one run."""
    excesses = numerics.measure(outcome, setting).excesses
    if not excesses:
        return []
    worst = max(excesses, key=lambda e: e.error / max(e.excused, 1e-30))
    if worst.error < ORDER and setting.lowest(numerics.sample) == torch.float32:
        return []  # the order of addition does not matter here, only that the sum is fp32
    return [_finding("AC006", worst, outcome, setting, numerics.subject, numerics.sample)]


def long_sums(numerics: Numerics, setting: Setting, axis: Axis) -> tuple[list[Fault], str | None]:
    """AC007: what only shows at thousands of rows or columns; and why it could not be looked at, if so."""
    subject, sample = numerics.subject, numerics.sample
    short = attempt(subject, sample, setting)
    some = axis.grow(sample, SOME)
    if not short.ran or some is None or (axis is COLUMNS and _numbers(some) > axis.largest):
        return [], None
    longer = attempt(subject, some, setting)
    if not longer.ran:
        # a function may well have a fixed width: nothing to say of that
        return [], f"long reductions: the function refuses its inputs lengthened to {_rows(some)} rows" if axis is ROWS else None
    # a result of rows times rows (weights that look like rows, attention) costs too much at thousands
    square = _results(longer) * axis.extent(sample) > 1.5 * _results(short) * axis.extent(some)
    affordable = SOME if square else _affordable(numerics, setting, axis)
    grown = axis.grow(sample, max(SOME, min(LONG, affordable, axis.largest * SOME // max(1, _numbers(some))))) or some
    outcome = attempt(subject, grown, setting)
    if not outcome.ran:
        return [], f"long reductions: the function refuses its inputs lengthened to {axis.extent(grown)} {axis.word}"
    # wider rows make larger products, whose own rounding plain PyTorch shares: only what is worse than that is a sum's
    before, long = numerics.measure(short, setting), numerics.on(grown, inside_fp32=numerics.inside_fp32 and axis is ROWS)
    measured = long.measure(outcome, setting)
    excesses = [e for e in measured.excesses if e.result not in {x.result for x in before.excesses}]
    unit = torch.finfo(setting.lowest(sample)).eps / 2
    if not numerics.sighted:
        excesses = [e for e in excesses if e.error > GROWTH * max(before.errors.get(e.result, 0.0), unit)]
    if not excesses:
        # what plain PyTorch is off at this length is no fault of the function; a twin runs the same forward, sums and all
        shared = long.yardstick_errors(setting)
        shared = {n: error for n, error in shared.items() if long.plain is not None or n.startswith("gradient")}
        excesses = _growing(subject, sample, grown, setting, before.errors, measured.errors, unit, axis, shared)
    if not excesses:
        return [], None
    worst = max(excesses, key=lambda e: e.error / max(e.excused, 1e-30))
    key, finding = _finding("AC007", worst, outcome, setting, subject, grown, axis)
    short_error, long_error = percent(before.errors.get(worst.result, 0.0)), percent(worst.error)
    length = f"relative error {short_error} as given, {long_error} at {axis.extent(grown)} {axis.word}"
    return [(key, replace(finding, details=(("length", length), *finding.details)))], None


def _affordable(numerics: Numerics, setting: Setting, axis: Axis) -> int:
    """How many rows or columns fit the budget, going by what two exact runs cost: twice the rows may cost four times as much.

    The cost is counted and not timed: the same code and seed are judged at the same length on every machine.
    """
    taken = []
    for extent in (SOME // 4, SOME):
        sample = axis.grow(numerics.sample, extent) or numerics.sample
        with counted() as cost:
            numerics.on(sample).truth(setting)
        taken.append(max(1e-4, cost.seconds))
    power = min(2.0, max(1.0, math.log(taken[1] / taken[0], 4)))
    return int(SOME * (BUDGET / (RUNS * taken[1])) ** (1 / power))


def _results(outcome: Outcome) -> int:
    return sum(t.numel() for t in outcome.values)


def _numbers(sample: Sample) -> int:
    return sum(sample.tensor(s).numel() for s in sample.slots)


def _sums_grow(subject: Subject, sample: Sample, grown: Sample, setting: Setting) -> bool:
    """Whether more rows mean more additions into one low-precision tensor."""
    few, many = running_sums(subject, sample, setting), running_sums(subject, grown, setting)
    return any(count >= MANY and count >= 4 * few.get(place, 0) for place, count in many.items())


def _growing(
    subject: Subject,
    sample: Sample,
    grown: Sample,
    setting: Setting,
    short: dict[str, float],
    long: dict[str, float],
    unit: float,
    axis: Axis,
    shared: dict[str, float],
) -> list[Excess]:
    """Low-precision running sums seen at work: more additions into one low-precision tensor with more rows, and a larger error."""
    worse = [n for n, error in long.items() if error > 2 * unit and error > GROWTH * max(short.get(n, 0.0), unit / 2)]
    worse = [n for n in worse if long[n] > GROWTH * shared.get(n, 0.0)]
    if not worse:
        return []
    if not _sums_grow(subject, sample, grown, setting):
        return []
    return [Excess(n, long[n], GROWTH * max(short.get(n, 0.0), unit), f"the same function on fewer {axis.word}") for n in worse]


def _finding(code: str, excess: Excess, outcome: Outcome, setting: Setting, subject: Subject, sample: Sample, axis: Axis = ROWS) -> Fault:
    culprit = locate(subject, sample, setting, long_sum=code == "AC007")
    stage = "backward" if excess.result.startswith("gradient") else "forward"
    place = culprit.place if culprit else method_at_fault(subject, outcome, stage)
    low = name(str(culprit.dtype)) if culprit and culprit.dtype is not None else name(str(setting.lowest(sample)))
    row = f" (row {excess.worst_row} worst)" if excess.worst_row is not None else ""
    details = [("error", f"{percent(excess.error)} of its norm{row}; {percent(excess.excused)} is excused by {excess.yardstick}")]
    if culprit:
        details.append(("code", culprit.source))
        details.append(
            ("there", f"relative error {percent(culprit.before)} before this operator ({culprit.operator}), {percent(culprit.after)} after")
        )
    what = f"loses precision with the number of {axis.word}" if code == "AC007" else "is less precise than its dtypes explain"
    return (code, place.symbol, place.line), Finding(
        code=code,
        severity=Severity.ERROR,
        message=f"{place.symbol}: {excess.result} {what}",
        place=place if place.file else Place(file=subject.place.file, line=subject.place.line, symbol=place.symbol),
        cause=_cause(code, culprit, low),
        fix=_fix(code, culprit) if low != "fp32" else STABLE,
        observed=setting.describe(),
        details=tuple(details),
    )


def _cause(code: str, culprit: Culprit | None, low: str) -> str:
    if code == "AC007":
        times = f" ({culprit.repeats} additions)" if culprit and culprit.repeats > 1 else ""
        return f"a running sum is kept in {low}{times}: once it is 256 times larger than what is added (2048 in fp16), additions round away"
    if culprit and culprit.accumulates and culprit.after > 8 * max(culprit.before, 1e-9):
        return (
            f"cancellation after rounding: a value was rounded to {low} when it was stored in a buffer of that precision, and "
            "then a nearly equal "
            "one is subtracted from it, so that mostly the rounding error is left"
        )
    if culprit and culprit.accumulates and culprit.repeats >= 4:
        return f"a running sum is kept in {low} ({culprit.repeats} additions into one buffer): every addition rounds, and small ones vanish"
    if low == "fp32":
        return (
            "the formula itself loses the digits, in fp32 too: a value rounds to 0 or 1, or nearly equal ones are subtracted, before a "
            "logarithm, a quotient or a root"
        )
    return (
        f"an intermediate is kept or computed in {low}: its rounding is carried into the result, "
        "where fp32 inside and one rounding at the end would not"
    )


def _fix(code: str, culprit: Culprit | None) -> str:
    if code == "AC007" or (culprit and culprit.accumulates and culprit.repeats >= 4):
        return "accumulate in fp32 (`torch.zeros(..., dtype=torch.float32)`) and cast once at the end, or let one matrix product do the sum"
    return "widen once to fp32, finish the arithmetic there (subtract before rounding), and narrow once, in a single store at the end"
