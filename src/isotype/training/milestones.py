"""When a run ends, evaluates, saves and samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..config.schema import RunConfig


@dataclass
class Milestones:
    """Total steps, and the steps between evaluations, samples and checkpoints (0: never)."""

    total: int
    eval_every: int
    save_every: int
    sample_every: int

    @classmethod
    def of(cls, config: RunConfig, *, rows: int, eval_rows: int) -> Milestones:
        per_step = config.train.batch_size * config.train.accumulate
        total = config.train.steps or max(1, math.ceil(config.train.epochs * rows / per_step))
        tenth = max(1, math.ceil(total / 10))
        eval_every = (config.train.eval_every or tenth) if eval_rows else 0
        often = eval_every or tenth
        sample_every = often if config.run.sample_every is None else config.run.sample_every
        return cls(total, eval_every, config.run.save_every or often, sample_every)

    def due(self, every: int, step: int) -> bool:
        return bool(every) and (step % every == 0 or step == self.total)
