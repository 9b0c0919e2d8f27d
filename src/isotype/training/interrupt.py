"""Ctrl-C and SIGTERM: before the first step they stop at once; then the first has the loop save and stop, and the second stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Interrupt:
    """A context in which `asked` becomes true on SIGINT or SIGTERM.

    `training`: there is something to save, which the loop does after its step. Before, KeyboardInterrupt: tokenising may take hours.
    """

    def __init__(self) -> None:
        self.asked = self.training = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked or not self.training:
            raise KeyboardInterrupt
        self.asked = True
