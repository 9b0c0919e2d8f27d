"""Which rows of a step a process computes. The step is the same on any number of processes. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.schema import TrainSection
from ..errors import UsageError


@dataclass(frozen=True)
class Passes:
    """A step is `total` forward passes of `rows` rows, in the order of the data; `own` are those of this process."""

    rows: int
    total: int
    own: range

    @classmethod
    def of(cls, train: TrainSection, *, rank: int = 0, size: int = 1) -> Passes:
        """Whole passes are shared out where their number allows it, else rows: no pass has more than `train.batch_size`.

        Raises  UsageError where `batch_size` x `accumulate` rows cannot be shared out evenly, with the nearest numbers that can
        """
        step = train.batch_size * train.accumulate
        if step % size:
            raise UsageError(
                f"{size} processes cannot share {step} rows a step evenly (train.batch_size {train.batch_size} x train.accumulate "
                f"{train.accumulate})",
                fix=f"{_nearest(step, size)} can; or another train.accumulate, which is another step",
            )
        share = step // size
        rows = next(n for n in range(min(train.batch_size, share), 0, -1) if share % n == 0)
        each = share // rows
        return cls(rows, step // rows, range(rank * each, (rank + 1) * each))


def _nearest(step: int, size: int) -> str:
    """The numbers of processes next to `size` that share the rows of a step: `2 or 4 processes`."""
    able = [n for n in range(1, step + 1) if step % n == 0]
    below, above = max(n for n in able if n < size), min((n for n in able if n > size), default=None)
    return f"{below} process" + ("es" if below > 1 else "") if above is None else f"{below} or {above} processes"
