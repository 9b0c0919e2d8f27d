"""`Subject`: the prepared run that every check of the preflight gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...config.schema import RunConfig
from ..schedule import Milestones
from ..setup import Prepared
from ..task import Batch


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A prepared run. `resuming`: it continues from a checkpoint, so that some of its files already exist.

    task         a `training.task.Task`; of an attached trainer what the checks of tokens ask of one
    micro_batch  rows of a forward pass; by default train.batch_size
    """

    config: RunConfig
    task: Any
    prepared: Prepared
    plan: Milestones
    folder: Path
    resuming: bool = False
    micro_batch: int | None = None

    @cached_property
    def longest_rows(self) -> Sequence[Any]:
        """The rows of the largest batch that the feed could return."""
        rows: Sequence[Any] = self.task.largest(self.micro_batch or self.config.train.batch_size)
        return rows

    def batch_of(self, rows: Sequence[Any]) -> Batch:
        batch: Batch = self.task.collate(rows)
        return batch.to(self.prepared.device)
