"""Computes the learning rate of each step, the steps after which a run evaluates, saves and
generates samples, and the time that is left.
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
from ..wording import pluralise

PauseKind = Literal["evaluation", "samples", "checkpoint"]  # what a run does between two steps


def warmup_steps(train: TrainSection, total: int) -> int:
    """Returns the number of warm-up steps. If the setting `warmup` is below 1, it is a share of the
    steps; otherwise it is a number of steps.
    """
    if train.warmup < 1:
        return round(train.warmup * total)
    return int(train.warmup)


def learning_rate(train: TrainSection, step: int, total: int) -> float:
    """Returns the learning rate of step `step` of `total` steps. Steps are counted from 1. After
    the warm-up, the schedule is cosine, linear, constant or warmup-stable-decay.
    """
    warmup = warmup_steps(train, total)
    if step <= warmup:
        return train.learning_rate * step / (warmup + 1)
    # progress is 0 at the first step after warm-up, and just below 1 at the last step
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
    """Returns a warning if a step needs more rows than the data has. Returns None if a step uses
    each row at most once.
    """
    if rows_per_step <= rows:
        return None
    available_text = "there is 1" if rows == 1 else f"there are {rows}"
    return (
        f"a step takes {rows_per_step} rows and {available_text}: each comes {rows_per_step / rows:.3g}"
        " times in every step"
    )


EVALUATED_SHARE = 5  # by default one row is evaluated for every 5 trained rows
MIN_EVALUATED_ROWS = 32  # the losses of two steps can hardly be compared on fewer rows
MIN_EVALUATIONS = 2  # the evaluations before step 1 and at the end


def default_evaluations(
    train: TrainSection, total: int, eval_rows: int, *, is_decisive: bool
) -> tuple[int, int]:
    """Chooses the number of steps between evaluations, and the stride. With a stride of n, an
    evaluation uses every n-th row.

    An evaluation before step 1 and one after each tenth of the run are eleven evaluations. If each
    of them used all held-out rows, a short run could evaluate more rows than it trains on. For
    example, if 5% of 10,000 rows are held out, eleven evaluations need 5,500 rows, whereas 200
    steps of 4 rows train on 800 rows.

    is_decisive  whether an evaluation can end the run early or decides which weights are the
                 result; if so, the run always evaluates after each tenth of its steps
    """
    tenth = max(1, math.ceil(total / 10))
    evaluations = 1 + math.ceil(total / tenth)
    budget = total * train.batch_size * train.accumulate // EVALUATED_SHARE
    if eval_rows * evaluations <= budget:
        return tenth, 1
    most_stride = max(1, eval_rows // MIN_EVALUATED_ROWS)
    stride = min(most_stride, math.ceil(eval_rows * evaluations / max(1, budget)))
    rows = math.ceil(eval_rows / stride)
    if is_decisive or rows * evaluations <= budget:
        return tenth, stride
    evaluations = max(MIN_EVALUATIONS, budget // rows)
    return math.ceil(total / (evaluations - 1)), stride


@dataclass
class RunSchedule:
    """The total number of steps, and the numbers of steps between evaluations, samples, checkpoints
    and adapters. 0 means never.

    eval_rows    number of held-out rows
    eval_stride  an evaluation uses every `eval_stride`-th row; at the end of the run, all rows are
                 evaluated too
    """

    total: int
    eval_every: int
    save_every: int
    sample_every: int
    adapters_every: int = 0
    eval_rows: int = 0
    eval_stride: int = 1

    @classmethod
    def from_config(cls, config: RunConfig, *, rows: int, eval_rows: int) -> RunSchedule:
        rows_per_step = config.train.batch_size * config.train.accumulate
        total = config.train.steps or max(1, math.ceil(config.train.epochs * rows / rows_per_step))
        eval_every = config.train.eval_every or 0
        eval_stride = 1
        # without a setting, checkpoints are written after each tenth of the run, even if it
        # evaluates less often
        save_every = config.run.save_every or eval_every or max(1, math.ceil(total / 10))
        if not eval_rows:
            eval_every = 0
        elif not eval_every:
            is_decisive = config.train.patience is not None or config.run.save == "best"
            eval_every, eval_stride = default_evaluations(
                config.train, total, eval_rows, is_decisive=is_decisive
            )
        if config.run.sample_every is None:
            sample_every = math.ceil(total / 4)
        else:
            sample_every = config.run.sample_every
        return cls(
            total,
            eval_every,
            save_every,
            sample_every,
            config.run.adapters_every or 0,
            eval_rows,
            eval_stride,
        )

    @property
    def evaluations(self) -> int:
        """Returns the number of evaluations of the run, including those before step 1 and at the
        end of the run.
        """
        return 1 + math.ceil(self.total / self.eval_every) if self.eval_every else 0

    @property
    def evaluated_rows(self) -> int:
        """The number of rows that one evaluation uses. If there are several evaluation sets, the
        real number may be slightly larger, because the number of rows is rounded up in each set.
        """
        return math.ceil(self.eval_rows / self.eval_stride)

    def describe_evaluation(self, row: str) -> str:
        """Returns a text that says how often the run evaluates, and on how many rows.

        row  the word that the task uses for a row of its data
        """
        if not self.evaluations:
            return "no evaluation"
        rows = self.evaluations * self.evaluated_rows
        text = f"evaluation {self.evaluations} times, {pluralise(rows, row)} in all"
        if self.eval_stride > 1:
            text += (
                f" (the same {self.evaluated_rows:,} of {self.eval_rows:,} each time;"
                " once more all at the end)"
            )
        return text

    @property
    def sample_rounds(self) -> int:
        """The number of times that the run generates samples, including the samples before step 1."""
        if not self.sample_every:
            return 0
        return 1 + math.ceil(self.total / self.sample_every)

    def is_adapter_due(self, step: int) -> bool:
        """Returns True if an adapter is written after this step. No adapter is written after the
        last step, because the run then writes its result.
        """
        return bool(self.adapters_every) and step % self.adapters_every == 0 and step != self.total

    def is_due(self, interval: int, step: int) -> bool:
        return bool(interval) and (step % interval == 0 or step == self.total)


class Pace:
    """Measures the speed of a run. This class computes the median time of the last WINDOW steps,
    and the mean time of each kind of pause. A pause is an evaluation, a checkpoint or a round of
    samples between two steps. The first step is not counted, because it is slower than all other
    steps.
    """

    WINDOW = 50

    def __init__(self) -> None:
        self._step_seconds: deque[float] = deque(maxlen=self.WINDOW)
        self._is_warm = False
        self._start_time = 0.0
        self._pause_seconds: dict[PauseKind, list[float]] = defaultdict(list)

    def start(self) -> None:
        self._start_time = time.perf_counter()

    def lap(self) -> float:
        """Returns the seconds since `start`. The time is also recorded as the duration of one step."""
        seconds = time.perf_counter() - self._start_time
        if self._is_warm:
            self._step_seconds.append(seconds)
        self._is_warm = True
        return seconds

    @contextmanager
    def pause(self, kind: PauseKind) -> Iterator[None]:
        """Measures how long the block of this context manager takes. The block contains work
        between two steps, for example an evaluation.
        """
        start_time = time.perf_counter()
        try:
            yield
        finally:
            self._pause_seconds[kind].append(time.perf_counter() - start_time)

    def eta(self, schedule: RunSchedule, step: int) -> float | None:
        """Returns the estimated number of seconds until the end of the run. The estimate starts at
        the end of step `step`, so it includes the pauses that follow this step. Returns None if the
        time of a step has not been measured yet.
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
    """Returns the number of pauses from step `step` to the last step `total`. There is a pause
    after every `interval` steps and after the last step.
    """
    if not interval:
        return 0
    return total // interval - (step - 1) // interval + (total % interval != 0)
