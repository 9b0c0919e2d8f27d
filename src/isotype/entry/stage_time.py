"""Ends the stages of a quickstart in time, by what its own parts have taken so far on this machine."""

from __future__ import annotations

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
