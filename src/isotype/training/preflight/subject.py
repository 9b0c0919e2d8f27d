"""`Subject`: the prepared run that every check of the preflight gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from ...config.schema import RunConfig
from ..milestones import Milestones
from ..setup import Prepared
from ..task import Batch, Task

AnyTask = TypeVar("AnyTask", bound=Task, covariant=True)


@dataclass(frozen=True, kw_only=True)
class Subject(Generic[AnyTask]):
    """A prepared run. `resuming`: it continues from a checkpoint, so that some of its files already exist."""

    config: RunConfig
    task: AnyTask
    prepared: Prepared
    plan: Milestones
    folder: Path
    resuming: bool = False

    @cached_property
    def longest_rows(self) -> Sequence[Any]:
        """The rows of the largest batch that the feed could return."""
        return self.task.largest(self.config.train.batch_size)

    def batch_of(self, rows: Sequence[Any]) -> Batch:
        return self.task.collate(rows).to(self.prepared.device)
