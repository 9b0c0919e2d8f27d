"""Shows the progress of long work: a live line with the time left if stderr is a terminal, otherwise a plain line every half minute."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from ..wording import counted

T = TypeVar("T")
_PATIENCE = 1.0  # seconds of silence before the live line appears
_PLAIN = 30.0  # seconds between lines in a log


@dataclass
class Meter:
    """How many of a source's bytes (or rows, where it has no bytes) were read. A reader hands over its open file, whose position counts."""

    total: int = 0
    done: int = 0
    _file: IO[bytes] | None = None

    def reading(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, file: IO[bytes]) -> None:
        """Ends the reading of the current file."""
        self.done += 0 if file.closed else file.tell()
        self._file = None

    def share(self) -> float | None:
        """Between 0 and 1, or None where the total is not known."""
        if not self.total:
            return None
        at = self._file.tell() if self._file is not None and not self._file.closed else 0
        return min(1.0, (self.done + at) / self.total)


def watched(items: Iterable[T], what: str, meter: Meter | None = None) -> Iterator[T]:
    """The items, counted on a line that appears after a second and vanishes at the end; with `meter` also the time left."""
    live: Any = None
    if sys.stderr is not None and sys.stderr.isatty():
        from rich.console import Console

        live = Console(stderr=True).status("")
    start = shown = time.monotonic()
    wait = _PATIENCE if live else _PLAIN
    count = 0
    try:
        for item in items:
            count += 1
            yield item
            now = time.monotonic()
            if now - start > wait and now - shown > (0.2 if live else _PLAIN):
                shown = now
                line = progress(what, count, now - start, meter.share() if meter else None)
                if live:
                    live.update(line)
                    live.start()
                else:
                    print(line, file=sys.stderr, flush=True)
    finally:
        if live:
            live.stop()


def progress(what: str, count: int, seconds: float, share: float | None) -> str:
    """`tokenising chats.jsonl: 12,000 rows, 3,400/s, 31%, 0:08 left`"""
    line = f"{what}: {counted(count, 'row')}, {count / seconds:,.0f}/s"
    if not share:
        return line
    minutes, left = divmod(round(seconds * (1 - share) / share), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{line}, {share:.0%}, {f'{hours}:{minutes:02}' if hours else minutes}:{left:02} left"
