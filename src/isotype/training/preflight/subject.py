"""What every check of the preflight looks at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ...config.schema import RunConfig
from ...data.rows import Row
from ..batches import Batch, collate
from ..loop import Plan
from ..setup import Prepared


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A prepared run. `resuming`: it goes on from a checkpoint, so that some of its files exist already."""

    config: RunConfig
    prepared: Prepared
    plan: Plan
    folder: Path
    resuming: bool = False

    @cached_property
    def longest_rows(self) -> list[Row]:
        """The rows of the largest batch that the stream could ever hand out."""
        return self.prepared.data.longest(self.config.train.batch_size)

    def batch_of(self, rows: list[Row]) -> Batch:
        return collate(rows, pad_id=self.prepared.tokenizer.pad_token_id, device_type=self.prepared.device.type).to(self.prepared.device)

    @cached_property
    def formats(self) -> set[str]:
        """The formats of the training files, as data.json has them."""
        return {form for file in self.prepared.data.facts["train"]["files"] for form in str(file.get("format")).split(", ")}
