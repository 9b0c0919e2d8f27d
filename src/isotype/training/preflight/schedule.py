"""PF002: the run ends before its warm-up does. PF021: a step takes more rows than there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...counted import counted
from ...finding import Finding, Place, Severity
from ..schedule import learning_rate, repeats_in_a_step, warmup_steps
from .subject import Subject


def never_leaves_warmup(subject: Subject[Any]) -> Iterator[Finding]:
    train, total = subject.config.train, subject.plan.total
    warmup = warmup_steps(train, total)
    if warmup < total:
        return
    highest = learning_rate(train, total, total)
    yield Finding(
        code="PF002", severity=Severity.WARNING, place=Place(symbol="train.warmup"),
        message=f"{counted(warmup, 'step')} of warm-up in a run of {total}: it never reaches its learning rate",
        declared=f"learning rate {train.learning_rate:g}, {train.schedule}", observed=f"at most {highest:.3g}, at the last step",
        fix=f"train.warmup below {total}, or a share of the steps (0.03)",
    )  # fmt: skip


def more_rows_in_a_step_than_there_are(subject: Subject) -> Iterator[Finding]:
    train, rows = subject.config.train, subject.task.rows
    said = None if subject.config.data.stream else repeats_in_a_step(train.batch_size * train.accumulate, rows)
    if said is None:
        return
    yield Finding(
        code="PF021", severity=Severity.WARNING, place=Place(symbol="train.batch_size"), message=said,
        observed=f"train.batch_size {train.batch_size} x train.accumulate {train.accumulate}",
        fix=f"train.batch_size x train.accumulate at most {rows}",
    )  # fmt: skip
