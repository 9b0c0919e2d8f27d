"""AC006 for functions of one tensor, element by element, and for results that are not finite; AC022 for a value made from a weight that is
rounded before it is used, as in `x * (1 + weight)` in bf16.

Norms hide what a function of one tensor loses, so every element's error is counted in roundings: one of the result, and the change that one
rounding of the input makes. Plain code needs a reference, or a loss that no arrangement of the formula excuses. Roundings of activations
differ from row to row and average out; that of a weight's own expression is the same in every row. So each column's result is regressed on
its truth over many rows: slopes that differ from column to column by more than the rows' noise are a weight's rounding."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...dtypes import name
from ...finding import Finding, Place, Severity
from .attempt import Fault, Outcome, attempt
from .locate import locate
from .numerics import SLACK, Numerics
from .samples import LOW, PARAM, Sample, Setting, lengthened

ROWS = 1024
PARAMETERS = 16  # of a module: in deeper modules the rounding errors of activations no longer average out, for any weights
COLUMNS = 8  # fewer tell little
SHARE = 0.12  # of the dtype's step: one rounding of values between 1 and 2 has a deviation of 0.29 steps
ALIKE = 0.7  # correlation of the columns' slopes between two sets of rows
SURE = 5.0  # times the rows' own noise
OTHER_WAY = 6.0  # times the median row's error


def rounded_weights(numerics: Numerics, setting: Setting) -> list[Fault]:
    """Looks at one setting in which everything is one low dtype; nothing where there are no weights or no rows."""
    subject, sample = numerics.subject, numerics.sample
    if setting.autocast is not None or len(sample.met(setting.by_group)) != 1 or setting.lowest(sample) not in LOW:
        return []
    if subject.module is not None and sum(1 for _ in subject.module.parameters()) > PARAMETERS:
        return []
    if not (subject.groups or any(s.group.startswith(PARAM) for s in sample.slots)):
        return []
    first = _columns(numerics, setting, seed=0)
    for result, (slope, noise, dtype) in first.items():
        spread = float(slope.std())
        if spread <= SHARE * torch.finfo(dtype).eps or spread <= SURE * noise:
            continue
        again = _columns(numerics, setting, seed=1).get(result)  # other rows: a rounding of statistics of the rows would be another one
        if again is not None and again[0].shape == slope.shape and float(torch.corrcoef(torch.stack([slope, again[0]]))[0, 1]) > ALIKE:
            return [_finding(result, spread, noise, dtype, setting, numerics)]
    return []


def _columns(numerics: Numerics, setting: Setting, *, seed: int) -> dict[str, tuple[Tensor, float, torch.dtype]]:
    """Of each low-precision output: the columns' slopes, the rows' noise in them, and its dtype."""
    grown = many_rows(numerics.sample, seed)
    if grown is None:
        return {}
    outcome = attempt(numerics.subject, grown, setting, forward_only=True)
    truth = numerics.on(grown).truth(setting) if outcome.ran else {}
    found = {}
    for result, given in outcome.results().items():
        exactly = truth.get(result)
        if exactly is None or exactly.shape != given.shape or given.dim() < 2 or given.dtype not in LOW or given.shape[-1] < COLUMNS:
            continue
        if given.numel() // given.shape[-1] < ROWS:  # the last state of a recurrent layer has a row a sequence
            continue
        if (slopes := _slopes(given.detach().double(), exactly)) is not None:
            found[result] = (*slopes, given.dtype)
    return found


def many_rows(sample: Sample, seed: int) -> Sample | None:
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
            scaled[slot.index] = (tensor.detach().float() * factor.to(tensor.device)).to(tensor.dtype)
    return replace(grown, leaves=tuple(scaled.get(i, leaf) for i, leaf in enumerate(grown.leaves)))


def _slopes(given: Tensor, exactly: Tensor) -> tuple[Tensor, float] | None:
    """Each column's error regressed on its truth, and how much of that the rows' noise makes."""
    truth = exactly.flatten(0, -2)  # [rows columns]
    error = given.flatten(0, -2) - truth
    # a row that takes another way, as of a router whose two best experts are nearly equal, is off by no rounding
    off = error.norm(dim=1) / truth.norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    alike = off <= OTHER_WAY * off.median()
    truth, error = truth[alike], error[alike]
    weight = truth.square().sum(0)
    if not (torch.isfinite(error).all() and torch.isfinite(truth).all()) or not (weight > 0).all():
        return None
    slope = (error * truth).sum(0) / weight
    left = (error - slope * truth) * truth
    return slope, float((left.square().sum(0).sqrt() / weight).median())


def _finding(result: str, spread: float, noise: float, dtype: torch.dtype, setting: Setting, numerics: Numerics) -> Fault:
    subject, low = numerics.subject, name(dtype)
    place = subject.place
    return ("AC022", place.symbol, place.line), Finding(
        code="AC022",
        severity=Severity.WARNING,
        message=f"{subject.label}: {result} carries a rounding of its weights that is the same in every row",
        place=Place(file=place.file, line=place.line, symbol=subject.label),
        cause=f"something made from a weight is rounded to {low} before it meets the activations (1 + weight, a folded scale): column by "
        f"column the output is off by {spread:.1e} on average, where roundings of rows leave {noise:.1e} over {ROWS} rows",
        fix="widen the weight before its own arithmetic and narrow once at the end: (x_fp32 * (1.0 + weight.float())).to(x.dtype)",
        observed=setting.describe(),
    )


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
    return [_finding_elements(max(losses, key=lambda loss: loss.roundings / loss.excused), numerics, sample, setting)] if losses else []


def not_finite(outcome: Outcome, numerics: Numerics, setting: Setting) -> list[Fault]:
    """A result that is inf or NaN where the exact result is within its dtype's range."""
    truth = numerics.truth(setting)
    for result, given in outcome.results().items():
        exactly = truth.get(result)
        if exactly is None or exactly.shape != given.shape:
            continue
        if bool((~torch.isfinite(given) & _held(exactly, given.dtype)).any()):
            return [_finding_elements(_Loss(result, float("inf"), 0.0), numerics, numerics.sample, setting)]
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


def _finding_elements(loss: _Loss, numerics: Numerics, sample: Sample, setting: Setting) -> Fault:
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
