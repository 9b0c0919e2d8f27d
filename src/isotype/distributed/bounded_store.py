"""Wraps torch's key-value store so that every call has a time limit. Torch's own client waits
forever if the other process no longer runs but its connection stays open. This happens if the other
process received SIGSTOP, or if the machine of that process hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any


class StoreTimeoutError(RuntimeError):
    """Raised when the process that holds the store does not answer in time."""


class _Call:
    """One call of the store, with its result or its error."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function, self.finished = function, threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.function()
        except BaseException as error:
            self.error = error
        self.finished.set()


class BoundedStore:
    """Wraps a store. A thread runs the calls one after the other. The caller stops waiting after
    `timeout` seconds.

    timeout  the time limit of a call in seconds. If one call takes longer, every later call fails
             at once
    Raises   StoreTimeoutError, and the errors of the store itself
    """

    def __init__(self, store: Any, timeout: float) -> None:
        self.timeout = timeout
        self._store, self._calls = store, SimpleQueue[_Call]()
        self._is_silent = False
        # a daemon thread: while it waits for a frozen process, it must not keep this process alive
        threading.Thread(target=self._serve, name="store", daemon=True).start()

    def set(self, key: str, value: str) -> None:
        self._call(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        value: bytes = self._call(lambda: self._store.get(key))
        return value

    def delete(self, key: str) -> None:
        self._call(lambda: self._store.delete_key(key))

    def check(self, keys: Sequence[str]) -> bool:
        """Returns True if all these keys have a value in the store."""
        return bool(self._call(lambda: self._store.check(list(keys))))

    def clone(self) -> BoundedStore:
        """Opens another connection to the store. Calls on the new connection do not have to wait
        for calls on this connection.
        """
        return BoundedStore(self._call(self._store.clone), self.timeout)

    def _serve(self) -> None:
        while True:
            self._calls.get().run()

    def _call(self, function: Callable[[], Any]) -> Any:
        call = _Call(function)
        if not self._is_silent:
            self._calls.put(call)
            self._is_silent = not call.finished.wait(self.timeout)
        if self._is_silent:
            raise StoreTimeoutError(f"the store did not answer within {self.timeout:g} s")
        if call.error is not None:
            raise call.error
        return call.result
