"""Handles Ctrl-C, SIGTERM and SIGHUP. Before the first step a signal stops the run at once. During training the first signal makes the
loop save and stop, and the second one stops it at once."""

from __future__ import annotations

import os
import signal
import stat
import threading
from types import FrameType
from typing import Any


class Interrupt:
    """A context in which SIGINT, SIGTERM or SIGHUP (a closed terminal or a broken connection) sets `asked`.

    While `training` is true, the loop saves after its step and stops. Before that a signal raises KeyboardInterrupt, since tokenising may
    take hours.
    """

    def __init__(self) -> None:
        self.asked = self.training = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
            if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup has it ignored
                self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._hang_up)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def begin(self) -> None:
        """Marks the start of training. Raises KeyboardInterrupt if an earlier one was swallowed, by a `__del__` or a library."""
        if self.asked:
            raise KeyboardInterrupt
        self.training = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        at_once = self.asked or not self.training
        self.asked = True
        if at_once:
            raise KeyboardInterrupt

    def _hang_up(self, number: int, frame: FrameType | None) -> None:
        """Handles SIGHUP. It may arrive twice, from the kernel and from the shell, and printing to the closed terminal would fail."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            if stat.S_ISCHR(os.fstat(stream).st_mode):
                os.dup2(nowhere, stream)
        os.close(nowhere)
        if not self.asked:
            self._handle(number, frame)
