"""Measures the speed of a run: estimates the time left, with evaluations, samples and checkpoints, and limits the time for samples."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

PauseKind = Literal["evaluation", "samples", "checkpoint"]
SHARE_OF_SAMPLES = 0.1  # of the time spent in steps, where run.sample_every is not given
FREE_SAMPLE_SECONDS = 10.0  # samples may take this long in any run, however short


class Times(Protocol):
    """Steps of a run, and the steps between its pauses (0: never)."""

    total: int
    eval_every: int
    save_every: int
    sample_every: int


class Pace:
    """Mean seconds of a step (over about the last WINDOW; the first warms up and does not count) and of each kind of pause."""

    WINDOW = 50

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: float | None = None
        self._seen = 0
        self._at = clock()
        self._paused: dict[PauseKind, list[float]] = defaultdict(list)

    def start(self) -> None:
        self._at = self._clock()

    def lap(self) -> float:
        """Seconds since `start`."""
        seconds = self._clock() - self._at
        self._seen += 1
        if self._seen > 1:
            known = self._seconds or 0.0
            self._seconds = known + (seconds - known) / min(self._seen - 1, self.WINDOW)
        return seconds

    @contextmanager
    def pause(self, kind: PauseKind) -> Iterator[None]:
        """Measures what is done between steps."""
        begin = self._clock()
        try:
            yield
        finally:
            self._paused[kind].append(self._clock() - begin)

    def mean(self, kind: PauseKind) -> float:
        """Seconds of one such pause, 0 before the first was measured."""
        seen = self._paused[kind]
        return sum(seen) / len(seen) if seen else 0.0

    def last(self, kind: PauseKind) -> float:
        return self._paused[kind][-1] if self._paused[kind] else 0.0

    def eta(self, times: Times, step: int, *, sample_seconds_left: float = math.inf) -> float | None:
        """Seconds until the end, right after step `step` and before the pauses that follow it; None before the first measurement.

        sample_seconds_left  the most time that further samples may take
        """
        if self._seconds is None:
            return None
        samples = pauses_left(times.total, times.sample_every, step) * self.mean("samples")
        return (
            self._seconds * (times.total - step)
            + pauses_left(times.total, times.eval_every, step) * self.mean("evaluation")
            + pauses_left(times.total, times.save_every, step) * self.mean("checkpoint")
            + min(samples, max(0.0, sample_seconds_left))
        )

    def steps_seconds(self, steps: int) -> float:
        """Expected seconds of so many steps, without pauses."""
        return (self._seconds or 0.0) * steps


def pauses_left(total: int, every: int, step: int) -> int:
    """Pauses at steps from `step` to `total`: at the multiples of `every`, and at the last step."""
    if not every:
        return 0
    return total // every - (step - 1) // every + (total % every != 0)


def sample_seconds(trained_seconds: float) -> float:
    """The most that all samples of a run may have taken after so many seconds in its steps, where run.sample_every is not given."""
    return max(FREE_SAMPLE_SECONDS, SHARE_OF_SAMPLES * trained_seconds)
