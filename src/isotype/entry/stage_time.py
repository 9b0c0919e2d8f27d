"""Keeps a quickstart to its time: the threads that are fastest now, the speed of a step, and stages that end in time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from ..training.callbacks import Callback, Moment


class StageTime(Callback):
    """The time of two stages, one after the other, that are to end together within `most` seconds from now.

    The end of a stage (evaluation, samples, saving, the check of the result) is not known before the first one has ended: until then it is
    taken to last as long as the stage's start, which has the same parts.

    share  of the seconds for steps, those that the first stage has
    least  stage -> steps that are done in any case
    after  seconds, as a share of those that the command took before the first stage, for what follows the second
    """

    def __init__(
        self, most: float, *, share: float, least: Mapping[str, int], after: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._began = clock, clock()
        self._ends, self._share, self._least, self._after = self._began + most, share, least, after
        self._stage, self._begun, self._last = "", self._began, self._began
        self._steps_end = self._ends
        self._start = self._end = 0.0
        self._first = True
        self.stopped_at: int | None = None

    @property
    def left(self) -> float:
        """Seconds for the steps of the second stage, once the first has ended."""
        return self._ends - self._clock() - self._start - self._end

    def begin(self, stage: str) -> None:
        if self._first and not self._stage:
            self._ends -= self._after * (self._clock() - self._began)
        self._stage, self._begun, self._start, self.stopped_at = stage, self._clock(), 0.0, None
        self._steps_end = self._ends - self._end

    def on_step(self, moment: Moment) -> None:
        self._last = self._clock()
        if not self._start:
            self._start = self._last - self._begun
            if self._first:  # its own end, and start and end of the second stage, are still to come
                self._steps_end = self._last + self._share * (self._ends - self._last - 3 * self._start)
        if self._last >= self._steps_end and self._least[self._stage] <= moment.step < moment.total:
            self.stopped_at = moment.step
            moment.stop()

    def end(self) -> None:
        """A stage has ended."""
        self._end, self._first = (self._clock() - self._last if self._start else 0.0), False


def take_fewer_threads_where_faster(say: Callable[[str], None]) -> None:
    """Uses fewer threads where they are faster now, whatever the load was in the last minute. An ordinary run only advises this, since the
    number of threads decides the order of sums."""
    import torch

    from ..training.contention import contention

    found = contention(load=lambda: math.inf)
    if found is not None and found.best < found.threads:
        gain = found.seconds[found.threads] / found.seconds[found.best]
        say(f"cores     {found.best} of {found.threads} threads: {gain:.1f} times as fast as all, since other programs use the cores")
        torch.set_num_threads(found.best)


def timed(step: Callable[[], object], times: int) -> float:
    """Seconds of a step: the lower quartile of so many, since other programs slow some of them; the first starts the threads."""
    seen = []
    for _ in range(times):
        begin = time.perf_counter()
        step()
        seen.append(time.perf_counter() - begin)
    return sorted(seen[1:])[times // 4]
