"""Checks, before anything is loaded, that the packages of `run.trackers` are installed. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from ...errors import UsageError


def missing(trackers: Sequence[str]) -> list[str]:
    """A line for each tracker whose package is not installed; the packages and the extras have the trackers' names."""
    gone = [name for name in dict.fromkeys(trackers) if find_spec(name) is None]
    return [f"run.trackers: {name} is not installed: pip install 'isotype[{name}]', or leave it out of run.trackers" for name in gone]


def refuse_missing(trackers: Sequence[str]) -> None:
    """Raises  UsageError naming what is not installed."""
    if lines := missing(trackers):
        raise UsageError("\n".join(lines))
