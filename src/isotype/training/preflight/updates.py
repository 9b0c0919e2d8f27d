"""PF003: updates that are lost by rounding to nearest.

AdamW moves a weight by the learning rate times m / sqrt(v), which is 1 at the first step and 0.2 to 0.4 (root mean square) later
(Liu et al. 2025, "Muon is scalable for LLM training"). A step below half the distance to the next number of the dtype is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...dtypes import to_torch
from ...finding import Finding, Place, Severity
from ...precision.parts import local_part
from .subject import Subject

TYPICAL = 0.2  # of the learning rate: what AdamW moves a weight by
MANY, NEARLY_ALL = 0.5, 0.9  # shares of the weights that cannot move: a warning, an error
SAMPLED = 4096  # elements looked at in each tensor


def vanishing_updates(subject: Subject[Any]) -> Iterator[Finding]:
    """Compares the update that the learning rate makes with the spacing of each trained tensor's dtype at its own magnitudes."""
    train, precision = subject.config.train, subject.prepared.resolved.precision
    rate = train.learning_rate
    if rate == 0:
        yield Finding(
            code="PF003", severity=Severity.ERROR, place=Place(symbol="train.learning_rate"),
            message="the learning rate is 0: nothing would be learnt", fix="train.learning_rate above 0",
        )  # fmt: skip
        return
    stochastic = precision.rounding == "stochastic" and train.optimizer == "adamw"
    if stochastic and precision.trainable != "fp32":
        return
    trained = [(name, p) for name, p in subject.prepared.model.named_parameters() if p.requires_grad and local_part(p).numel()]
    stuck, total, still = 0.0, 0, []
    for name, parameter in trained:
        part = local_part(parameter)
        share = stuck_share(part, rate * TYPICAL)
        stuck += share * part.numel()
        total += part.numel()
        if share == 1.0:
            still.append(name)
    share = stuck / max(1, total)
    if share < MANY:
        return
    yield Finding(
        code="PF003", severity=Severity.ERROR if share >= NEARLY_ALL else Severity.WARNING,
        place=Place(symbol="train.learning_rate, precision.trainable, precision.rounding"),
        message=f"a typical update is lost in {share:.0%} of the trained weights",
        declared=f"learning rate {rate:g}, {precision.trainable} weights, rounded to nearest",
        cause=f"{precision.trainable} keeps {-int(math.log2(torch.finfo(to_torch(precision.trainable)).eps)) + 1} bits: a change below "
        "half of the last one rounds away",
        fix=_fix(precision.trainable, train.optimizer, rate),
        details=(("still", f"{len(still)} of {len(trained)} tensors cannot move at all, {still[0]} first"),) if still else (),
    )  # fmt: skip


def _fix(trainable: str, optimizer: str, rate: float) -> str:
    """Nothing that the settings have already."""
    larger = f"a train.learning_rate above {rate:g}"
    if trainable == "fp32":
        return larger
    stochastic = "precision.rounding: stochastic, " if optimizer == "adamw" else ""
    return f"{stochastic}precision.trainable: fp32, or {larger}"


def stuck_share(weight: nn.Parameter | Tensor, update: float) -> float:
    """The share of elements that `update` does not change when the result is rounded to nearest in the weight's dtype.

    weight  F[...]
    inside  fp32
    """
    flat = weight.detach().flatten()
    flat = flat[:: max(1, flat.numel() // SAMPLED)]
    # toward zero, where numbers lie closer below a power of two: the more generous direction
    moved = (flat.float() - update * flat.float().sign()).to(flat.dtype)
    return float(((moved == flat) & (flat != 0)).float().mean())
