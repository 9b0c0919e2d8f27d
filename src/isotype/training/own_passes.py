"""The forward passes of a process in a step. Rows of several shapes take a pass for each shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..distributed.passes import Passes
from .feed import Feed
from .task import Batch, Task


@dataclass(frozen=True)
class Idle:
    """A batch that is computed since another process computes one now. It counts nothing."""

    batch: Batch
    rows: int = field(init=False, default=0)
    weight: int = field(init=False, default=0)
    units: int = field(init=False, default=0)

    def to(self, device: torch.device) -> Idle:
        return Idle(self.batch.to(device))


def own_batches(task: Task, stream: Feed[object], passes: Passes, *, together: bool) -> list[Batch]:
    """Takes the rows of a step and collates those of this process; those of others are skipped.

    together  the processes share a model, whose forward is one of all: each makes as many passes as the one that has most
    """
    taken: list[Sequence[Sequence[object]]] = [task.one_shape_each(stream.take(passes.rows)) for _ in range(passes.total)]
    own = [rows for number in passes.own for rows in taken[number]]
    batches = [task.collate(rows) for rows in own]
    if not together:
        return batches
    each = len(passes.own)
    most = max(sum(map(len, taken[first : first + each])) for first in range(0, passes.total, each))
    return batches + [Idle(task.collate(own[0][:1])) for _ in range(most - len(own))]
