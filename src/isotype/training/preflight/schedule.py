"""PF002: the run ends before its warm-up does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...finding import Finding, Place, Severity
from ..schedule import learning_rate, warmup_steps
from .subject import Subject


def never_leaves_warmup(subject: Subject[Any]) -> Iterator[Finding]:
    train, total = subject.config.train, subject.plan.total
    warmup = warmup_steps(train, total)
    if warmup < total:
        return
    highest = learning_rate(train, total, total)
    yield Finding(
        code="PF002", severity=Severity.WARNING, place=Place(symbol="train.warmup"),
        message=f"{warmup} steps of warm-up in a run of {total}: it never reaches its learning rate",
        declared=f"learning rate {train.learning_rate:g}, {train.schedule}", observed=f"at most {highest:.3g}, at the last step",
        fix=f"train.warmup below {total}, or a share of the steps (0.03)",
    )  # fmt: skip
