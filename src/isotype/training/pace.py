"""Measures the speed of a run: estimates the time left, with evaluations, samples and checkpoints, and limits the time for samples."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, median_low
from typing import Literal, Protocol

PauseKind = Literal["evaluation", "samples", "checkpoint"]
SHARE_OF_SAMPLES = 0.1  # of the time spent in steps, where run.sample_every is not given
FREE_SAMPLE_SECONDS = 10.0  # samples may take this long in any run, however short


STOOD_STILL = 10.0  # times the median: the process was stopped, the machine slept; an observed step takes some six times an ordinary one


class Times(Protocol):
    """Steps of a run, and the steps between its pauses (0: never)."""

    total: int
    eval_every: int
    save_every: int
    sample_every: int


class Pace:
    """Mean seconds of a step (of the last WINDOW; the first warms up and does not count) and of each kind of pause, without those in which
    the process stood still."""

    WINDOW = 50

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._laps: deque[float] = deque(maxlen=self.WINDOW)
        self._warm = False
        self._at = clock()
        self._paused: dict[PauseKind, list[float]] = defaultdict(list)

    def start(self) -> None:
        self._at = self._clock()

    def lap(self) -> float:
        """Seconds since `start`."""
        seconds = self._clock() - self._at
        if self._warm:
            self._laps.append(seconds)
        self._warm = True
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
        return usual(self._paused[kind])

    def last(self, kind: PauseKind) -> float:
        return self._paused[kind][-1] if self._paused[kind] else 0.0

    def eta(self, times: Times, step: int, *, sample_seconds_left: float = math.inf) -> float | None:
        """Seconds until the end, right after step `step` and before the pauses that follow it; None before the first measurement.

        sample_seconds_left  the most time that further samples may take
        """
        if not self._laps:
            return None
        samples = pauses_left(times.total, times.sample_every, step) * self.mean("samples")
        return (
            self.steps_seconds(times.total - step)
            + pauses_left(times.total, times.eval_every, step) * self.mean("evaluation")
            + pauses_left(times.total, times.save_every, step) * self.mean("checkpoint")
            + min(samples, max(0.0, sample_seconds_left))
        )

    def steps_seconds(self, steps: int) -> float:
        """Expected seconds of so many steps, without pauses."""
        return usual(self._laps) * steps


def usual(seconds: Sequence[float]) -> float:
    """The mean of those that are no more than STOOD_STILL times their median; 0 of none."""
    if not seconds:
        return 0.0
    most = STOOD_STILL * median_low(seconds)
    return fmean(s for s in seconds if s <= most)


def pauses_left(total: int, every: int, step: int) -> int:
    """Pauses at steps from `step` to `total`: at the multiples of `every`, and at the last step."""
    if not every:
        return 0
    return total // every - (step - 1) // every + (total % every != 0)


def sample_seconds(trained_seconds: float) -> float:
    """The most that all samples of a run may have taken after so many seconds in its steps, where run.sample_every is not given."""
    return max(FREE_SAMPLE_SECONDS, SHARE_OF_SAMPLES * trained_seconds)
