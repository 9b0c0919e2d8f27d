"""PF004: the checkpoints and the result will not fit on the disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...dtypes import to_torch
from ...finding import Finding, Place, Severity
from ..console import size
from ..memory.plan import optimizer_bytes
from .subject import Subject


def disk_too_small(subject: Subject[Any]) -> Iterator[Finding]:
    """Counts the checkpoints that exist at once: `run.keep`, the best, and the one being written before an old one is removed."""
    free = shutil.disk_usage(subject.folder).free
    one, result = checkpoint_bytes(subject), result_bytes(subject)
    kept = min(subject.config.run.keep, saves(subject)) + (1 if subject.plan.eval_every else 0)
    there = _bytes_of(subject.folder / "checkpoints") if subject.resuming else 0
    needed = (kept + 1) * one + result - there
    if needed <= free:
        return
    yield Finding(
        code="PF004", severity=Severity.ERROR, place=Place(symbol="run.folder", file=str(subject.folder)),
        message=f"the run writes up to {size(needed)}, and {size(free)} are free",
        details=(("checkpoints", f"{kept} kept and 1 in writing, {size(one)} each"), ("result", size(result))),
        fix="free space, another run.folder, or a smaller run.keep",
    )  # fmt: skip


def checkpoint_bytes(subject: Subject[Any]) -> int:
    """Bytes of the trained tensors and the optimizer's states; the other parts of a checkpoint are kilobytes."""
    train, precision = subject.config.train, subject.prepared.resolved.precision
    trained = [p for p in subject.prepared.model.parameters() if p.requires_grad]
    return sum(p.numel() * p.element_size() + optimizer_bytes(p.numel(), train, precision) for p in trained)


def result_bytes(subject: Subject[Any]) -> int:
    """The adapter or the model in the dtype it is saved in."""
    precision, parameters = subject.prepared.resolved.precision, list(subject.prepared.model.parameters())
    if subject.config.adapter.kind == "none":
        return sum(p.numel() for p in parameters) * to_torch(precision.save_model).itemsize
    return sum(p.numel() for p in parameters if p.requires_grad) * to_torch(precision.save_adapter).itemsize


def saves(subject: Subject[Any]) -> int:
    """How many checkpoints the plan writes in all."""
    plan = subject.plan
    return max(1, -(-plan.total // plan.save_every)) if plan.save_every else 1


def _bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
