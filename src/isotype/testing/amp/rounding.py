"""AC022: a value made from a weight that is rounded before it is used, as in `x * (1 + weight)` in bf16 (four norms of transformers 5.23).

Roundings of activations differ from row to row and average out; that of a weight's own expression is the same in every row. So each
column's result is regressed on its truth over many rows: slopes that differ from column to column by more than the rows' noise are a
weight's rounding.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...dtypes import name
from ...finding import Finding, Place, Severity
from .attempt import Fault, attempt
from .numerics import Numerics
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
