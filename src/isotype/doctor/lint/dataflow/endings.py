"""How a run of a function ends before its last statement."""

from __future__ import annotations

from typing import Any


class Return(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class Leave(Exception):
    """break or continue; `again` for continue."""

    def __init__(self, again: bool) -> None:
        self.again = again


class PathEnds(Exception):
    """The code raised, or torch would have: nothing after this is reached."""


class Impossible(Exception):
    """torch has no kernel for this dtype, so that the function cannot run on this path in this scenario."""


class OutOfSteps(Exception):
    """The function is too long to be followed."""
