"""A progress line on stderr for work that takes long, only where stderr is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
_PATIENCE = 1.0  # seconds of silence before the line appears


def watched(items: Iterable[T], what: str) -> Iterator[T]:
    """The items, counted on a line that appears after a second and vanishes at the end."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console

    start = shown = time.monotonic()
    console = Console(stderr=True)
    status = console.status("")
    count = 0
    try:
        for item in items:
            count += 1
            yield item
            now = time.monotonic()
            if now - start > _PATIENCE and now - shown > 0.2:
                shown = now
                status.update(f"{what}: {count:,} rows, {count / (now - start):,.0f}/s")
                status.start()
    finally:
        status.stop()
