"""The course of a run: its learning rate, the steps at which it evaluates, saves and samples, and
its pace (time left).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from ..config.schema import RunConfig, TrainSection

PauseKind = Literal["evaluation", "samples", "checkpoint"]


def warmup_steps(train: TrainSection, total: int) -> int:
    """`warmup` below 1 is a share of the steps, from 1 on a number of steps."""
    if train.warmup < 1:
        return round(train.warmup * total)
    return int(train.warmup)


def learning_rate(train: TrainSection, step: int, total: int) -> float:
    """The learning rate of step `step`, counted from 1, of `total`: warm-up, then cosine, linear,
    constant or warmup-stable-decay.
    """
    warmup = warmup_steps(train, total)
    if step <= warmup:
        return train.learning_rate * step / (warmup + 1)
    # 0 at the first full step, just below 1 at the last
    progress = (step - warmup - 1) / max(1, total - warmup)
    floor = train.min_learning_rate
    if train.schedule == "cosine":
        factor = floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2
    elif train.schedule == "linear":
        factor = floor + (1 - floor) * (1 - progress)
    elif train.schedule == "wsd":
        decayed_share = max(0.0, step - 1 - (1 - train.decay) * total) / max(
            1.0, train.decay * total
        )
        factor = 1 - (1 - floor) * min(1.0, decayed_share)
    else:
        factor = 1.0
    return train.learning_rate * factor


def repeated_rows_warning(rows_per_step: int, rows: int) -> str | None:
    """A warning about a step that takes more rows than the data has; None if each row comes at most
    once in a step.
    """
    if rows_per_step <= rows:
        return None
    available_text = "there is 1" if rows == 1 else f"there are {rows}"
    return (
        f"a step takes {rows_per_step} rows and {available_text}: each comes {rows_per_step / rows:.3g}"
        " times in every step"
    )


@dataclass
class RunSchedule:
    """Total steps, and the steps between evaluations, samples, checkpoints and adapters (0: never)."""

    total: int
    eval_every: int
    save_every: int
    sample_every: int
    adapters_every: int = 0

    @classmethod
    def from_config(cls, config: RunConfig, *, rows: int, eval_rows: int) -> RunSchedule:
        rows_per_step = config.train.batch_size * config.train.accumulate
        total = config.train.steps or max(1, math.ceil(config.train.epochs * rows / rows_per_step))
        tenth = max(1, math.ceil(total / 10))
        eval_every = (config.train.eval_every or tenth) if eval_rows else 0
        interval = eval_every or tenth
        if config.run.sample_every is None:
            sample_every = math.ceil(total / 4)
        else:
            sample_every = config.run.sample_every
        return cls(
            total,
            eval_every,
            config.run.save_every or interval,
            sample_every,
            config.run.adapters_every or 0,
        )

    def is_adapter_due(self, step: int) -> bool:
        """Whether an adapter is written after a step; after the last one the result is."""
        return bool(self.adapters_every) and step % self.adapters_every == 0 and step != self.total

    def is_due(self, interval: int, step: int) -> bool:
        return bool(interval) and (step % interval == 0 or step == self.total)


class Pace:
    """Median seconds of a step (of the last WINDOW; the first warms up and does not count), and
    mean seconds of each kind of pause.
    """

    WINDOW = 50

    def __init__(self) -> None:
        self._step_seconds: deque[float] = deque(maxlen=self.WINDOW)
        self._is_warm = False
        self._started = 0.0
        self._pause_seconds: dict[PauseKind, list[float]] = defaultdict(list)

    def start(self) -> None:
        self._started = time.perf_counter()

    def lap(self) -> float:
        """Seconds since `start`."""
        seconds = time.perf_counter() - self._started
        if self._is_warm:
            self._step_seconds.append(seconds)
        self._is_warm = True
        return seconds

    @contextmanager
    def pause(self, kind: PauseKind) -> Iterator[None]:
        """Measures the time of this block, which runs between steps."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._pause_seconds[kind].append(time.perf_counter() - begin)

    def eta(self, schedule: RunSchedule, step: int) -> float | None:
        """Seconds until the end, right after step `step` and before the pauses that follow it; None
        before the first measurement.
        """
        if not self._step_seconds:
            return None
        intervals: dict[PauseKind, int] = {
            "evaluation": schedule.eval_every,
            "checkpoint": schedule.save_every,
            "samples": schedule.sample_every,
        }
        pauses = sum(
            pauses_left(schedule.total, interval, step) * fmean(self._pause_seconds[kind] or [0.0])
            for kind, interval in intervals.items()
        )
        return median(self._step_seconds) * (schedule.total - step) + pauses


def pauses_left(total: int, interval: int, step: int) -> int:
    """Pauses at steps from `step` to `total`: at the multiples of `interval`, and at the last step."""
    if not interval:
        return 0
    return total // interval - (step - 1) // interval + (total % interval != 0)
