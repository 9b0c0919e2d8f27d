"""AC006 for functions of one tensor, element by element (an activation, a soft cap), and for results that are not finite.

Norms hide what such a function loses: a hand-written GELU in bf16 is off by a few roundings where it is small, a soft cap's gradient is
noise where it saturates. So every element's error is counted in roundings: one of the result, and the change that one rounding of the input
makes, which no code can avoid. Plain code needs a reference, or a loss that no arrangement of the formula excuses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...dtypes import name
from ...finding import Finding, Severity
from .attempt import Outcome, attempt
from .fault import Fault
from .locate import locate
from .numerics import SLACK, Numerics
from .rounded_weights import many_rows
from .samples import Sample
from .settings import Setting

MOST = 0.99  # of the elements: a few may be near a discontinuity
SOME = 3.0  # roundings that are excused beside a reference that makes fewer
BLIND = 10.0  # roundings that are excused without a reference; PyTorch's own tanh makes 4 in backward
SMALL = 1e-3  # elements below this share of the largest are judged as if they were as large
DRAWS = 4  # of input noise
LARGEST = 1 << 20  # elements


@dataclass(frozen=True)
class _Loss:
    result: str
    roundings: float
    excused: float


def scalar_losses(numerics: Numerics, setting: Setting) -> list[Fault]:
    """Looks at one setting in which everything is one low dtype."""
    subject, given = numerics.subject, numerics.sample
    if (
        subject.groups
        or len(given.slots) != 1
        or any(isinstance(x, Tensor) for i, x in enumerate(given.leaves) if i != given.slots[0].index)
    ):
        return []
    sample = many_rows(given, seed=0) or given
    if not 1 < sample.tensor(sample.slots[0]).numel() <= LARGEST:
        return []
    many = numerics.on(sample)
    outcome, truth = attempt(subject, sample, setting), many.truth(setting)
    if not outcome.ran or list(truth)[:1] != ["output"] or not _by_element(many, sample, setting, truth["output"]):
        return []
    unit = torch.finfo(setting.lowest(sample)).eps / 2
    runs = [many.exactly(setting, relative_noise=unit, noise_seed=seed) for seed in range(DRAWS)]
    beside = attempt(numerics.plain, sample, setting).results() if numerics.plain is not None else {}
    losses = []
    for result, exactly in truth.items():
        moved = [(run[result] - exactly).abs() for run in runs if result in run]
        if len(moved) < DRAWS or result not in outcome.results():
            continue
        held = _held(exactly, outcome.results()[result].dtype)
        if not held.any():
            continue
        rounding = unit * exactly.abs().clamp_min(SMALL * float(exactly[held].abs().max())) + torch.stack(moved).mean(0) / 0.8
        rounding[~held] = 0.0
        roundings = _most(outcome.results()[result], exactly, rounding)
        excused = max(SOME, SLACK * _most(beside[result], exactly, rounding)) if result in beside else BLIND
        if roundings > excused:
            losses.append(_Loss(result, roundings, excused))
    return [_finding(max(losses, key=lambda loss: loss.roundings / loss.excused), numerics, sample, setting)] if losses else []


def not_finite(outcome: Outcome, numerics: Numerics, setting: Setting) -> list[Fault]:
    """A result that is inf or NaN where the exact result is within its dtype's range."""
    truth = numerics.truth(setting)
    for result, given in outcome.results().items():
        exactly = truth.get(result)
        if exactly is None or exactly.shape != given.shape:
            continue
        if bool((~torch.isfinite(given) & _held(exactly, given.dtype)).any()):
            return [_finding(_Loss(result, float("inf"), 0.0), numerics, numerics.sample, setting)]
    return []


def _by_element(numerics: Numerics, sample: Sample, setting: Setting, output: Tensor) -> bool:
    """Whether each element of the output is made from the input's element of the same place, and how is the same everywhere."""
    slot = sample.slots[0]
    tensor = sample.tensor(slot).detach()
    if output.shape != tensor.shape:
        return False
    order = torch.randperm(tensor.numel(), generator=torch.Generator().manual_seed(0)).to(tensor.device)
    shuffled = numerics.on(sample.with_tensors({slot.index: tensor.flatten()[order].view_as(tensor)})).truth(setting)
    return "output" in shuffled and torch.allclose(shuffled["output"].flatten(), output.flatten()[order], rtol=1e-9, atol=0, equal_nan=True)


def _held(exactly: Tensor, dtype: torch.dtype) -> Tensor:
    """Where the truth is well within a dtype's range."""
    return exactly.abs() < torch.finfo(dtype).max / 2


def _most(given: Tensor, exactly: Tensor, rounding: Tensor) -> float:
    """How many roundings most elements are off by, those of no rounding left out."""
    off = ((given.double() - exactly).abs() / rounding)[rounding > 0]
    return float(off.sort().values[int(MOST * (off.numel() - 1))]) if off.numel() else 0.0


def _finding(loss: _Loss, numerics: Numerics, sample: Sample, setting: Setting) -> Fault:
    subject = numerics.subject
    low = name(str(setting.lowest(sample)))
    culprit = locate(subject, sample, setting)
    place = culprit.place if culprit else replace(subject.place, symbol=subject.label)
    endless = loss.roundings == float("inf")
    error = (
        "inf or NaN, where the same function in fp32 gives a number"
        if endless
        else f"{1 - MOST:.0%} of the elements are off by {loss.roundings:.0f} roundings or more; {loss.excused:.0f} are excused by "
        + ("four times what the reference makes" if numerics.plain is not None else "what one rounding of the input changes")
    )
    details = [("error", error), *([("code", culprit.source)] if culprit else [])]
    return ("AC006", place.symbol, place.line), Finding(
        code="AC006",
        severity=Severity.ERROR if numerics.plain is not None else Severity.WARNING,
        message=f"{place.symbol}: {loss.result} {'is not finite' if endless else 'is less precise than its dtypes explain'}",
        place=place,
        cause=f"the formula is computed in {low}, operator by operator: "
        + (
            f"a value rounds to 0 or 1, or leaves the range of {low}, before a logarithm, a quotient or a square"
            if endless
            else "a rounded value then has a nearly equal one subtracted from it (1 + tanh, 1 - t * t), so that mostly the rounding is left"
        ),
        fix="widen once to fp32, finish the arithmetic there, and narrow once at the end: `h = x.float(); ...; return out.to(x.dtype)`"
        + ("; or use PyTorch's stable form (logsigmoid, log_softmax, binary_cross_entropy_with_logits)" if endless else ""),
        observed=setting.describe(),
        details=tuple(details),
    )
