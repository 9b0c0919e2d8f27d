"""Shows the progress of long work. If stderr is a terminal, one line is updated; otherwise a new
line is printed every half minute.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

from ..wording import pluralise

T = TypeVar("T")


def track_progress(items: Iterable[T], label: str, estimated_count: int = 0) -> Iterator[T]:
    """Yields the items, and shows a line with the number of items so far. The line appears after a
    second and disappears at the end. If the total number of items is known, the line also shows the
    remaining time.

    estimated_count  an estimate of the number of items, if the exact number is not known; 0 if
                     there is no estimate
    """
    total = len(items) if isinstance(items, Sized) else estimated_count
    status_line: Any = None
    if sys.stderr is not None and sys.stderr.isatty():
        from rich.console import Console

        status_line = Console(stderr=True).status("")
    interval = 0.2 if status_line else 30.0
    start = time.monotonic()
    last_update = start + 0.8 if status_line else start
    try:
        for count, item in enumerate(items, start=1):
            yield item
            current = time.monotonic()
            if current - last_update > interval:
                last_update = current
                line = progress_line(label, count, total, current - start)
                if status_line:
                    status_line.update(line)
                    status_line.start()
                else:
                    print(line, file=sys.stderr, flush=True)
    finally:
        if status_line:
            status_line.stop()


def progress_line(label: str, count: int, total: int, seconds: float) -> str:
    """Returns a line such as `encoding pictures: 120 rows, 4/s, 31%, 1:08 left`."""
    line = f"{label}: {pluralise(count, 'row')}, {count / seconds:,.0f}/s"
    if total <= count:
        return line
    minutes, seconds_left = divmod(round(seconds * (total - count) / count), 60)
    hours, minutes = divmod(minutes, 60)
    time_left = f"{hours}:{minutes:02}" if hours else str(minutes)
    return f"{line}, {count / total:.0%}, {time_left}:{seconds_left:02} left"
