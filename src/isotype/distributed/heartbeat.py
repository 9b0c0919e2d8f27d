"""Writes and reads the heartbeats of the processes. Each process writes its step and activity to
the shared store, so that the other processes can name a process that has died or is late.

Gloo reports that a connection was closed or that a wait took too long, but not which process was
the cause. Therefore a thread in each process writes a heartbeat every HEARTBEAT_INTERVAL seconds. A
heartbeat contains a number that grows each time, the step, the current activity, and the number of
exchanges with other processes that this process has begun.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import errors
from ..errors import IsotypeError, RunError
from ..wording import first_line
from .bounded_store import BoundedStore

HEARTBEAT_INTERVAL = 0.5  # seconds between two heartbeats
# seconds without a heartbeat after which a process counts as dead; this is much longer than
# HEARTBEAT_INTERVAL, because a busy machine delays heartbeats
HEARTBEAT_TIMEOUT = 8.0
# seconds between two looks at the heartbeats of all processes, for each process: all processes look
# at the same time
SEARCH_PAUSE_PER_PROCESS = 0.01
FAILED_KEY = "failed"  # set after any process has reported an error; prefix of the reports' keys
ENDED_KEY = "ended"  # prefix of the keys of the processes that end because of another process


@dataclass
class Heartbeat:
    """Contains the state of a process, which the process itself writes from time to time.

    count      the number of heartbeats written so far
    exchanges  how many exchanges of data with all other processes this process has begun so far
    """

    rank: int
    host: str
    pid: int
    count: int = 0
    exchanges: int = 0
    step: int = 0
    activity: str = "starting"

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


class HeartbeatThread(threading.Thread):
    """Writes the heartbeats of this process until `stop`. The thread needs its own connection to
    the store, because another thread's waiting call would block a shared connection.
    """

    def __init__(self, store: BoundedStore, rank: int) -> None:
        super().__init__(name="signs of life", daemon=True)
        self.heartbeat = Heartbeat(rank, socket.gethostname(), os.getpid())
        self.store = store
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(HEARTBEAT_INTERVAL):
            self.heartbeat.count += 1
            try:
                self.write()
            except Exception:  # the store's process has ended; the next wait reports that
                return

    def write(self) -> None:
        self.store.set(f"sign/{self.heartbeat.rank}", json.dumps(asdict(self.heartbeat)))

    def stop(self) -> None:
        self._ended.set()
        if self.is_alive():
            self.join(timeout=2 * HEARTBEAT_INTERVAL)


def read_heartbeat(store: BoundedStore, rank: int) -> Heartbeat | None:
    """Returns the newest heartbeat of a process. Returns None if the process has never written a
    heartbeat.
    """
    key = f"sign/{rank}"
    if store.check([key]):
        return Heartbeat(**json.loads(store.get(key)))
    return None


def read_failure(store: BoundedStore, ranks: Iterable[int]) -> tuple[int, dict[str, Any]] | None:
    """Returns the first of these processes that reported an error, together with its report.
    Returns None if none of these processes reported an error.
    """
    if not store.check([FAILED_KEY]):  # one call, not one for each process
        return None
    for rank in ranks:
        if store.check([f"{FAILED_KEY}/{rank}"]):
            return rank, json.loads(store.get(f"{FAILED_KEY}/{rank}"))
    return None


def has_reported_its_end(store: BoundedStore, rank: int) -> bool:
    """Returns True if a process reported that it ends. A process reports its end after an error of
    its own, after an error of another process, or when the run is complete.
    """
    return any(store.check([f"{key}/{rank}"]) for key in (FAILED_KEY, ENDED_KEY, "left"))


def read_lost_message(store: BoundedStore, ranks: Iterable[int]) -> str:
    """Returns the message that one of these processes wrote when it ended because another process
    had failed. The message says which process failed. Returns "" if there is no such message.
    """
    for rank in ranks:
        if store.check([f"{ENDED_KEY}/{rank}"]) and (
            message := store.get(f"{ENDED_KEY}/{rank}").decode()
        ):
            return message
    return ""


@dataclass(frozen=True)
class LostProcess:
    """Describes a process that has died or is late, with its last heartbeat."""

    heartbeat: Heartbeat
    is_dead: bool
    symptom: str


def find_lost_processes(
    store: BoundedStore,
    local_heartbeat: Heartbeat,
    size: int,
    *,
    timeout: float = HEARTBEAT_TIMEOUT,
) -> list[LostProcess]:
    """Finds the processes that have died. If no process has died, finds the processes that have
    begun fewer exchanges of data than this process. A process that ended only because another
    process failed is not included. The search takes up to `timeout` seconds.
    """
    first_heartbeats = {
        rank: read_heartbeat(store, rank) or Heartbeat(rank, "an unknown machine", 0)
        for rank in range(size)
        if rank != local_heartbeat.rank
    }
    waiting = dict(first_heartbeats)
    deadline = time.monotonic() + timeout
    dead: list[LostProcess] = []
    while waiting and time.monotonic() < deadline:
        for rank, last_heartbeat in list(waiting.items()):
            ending = _describe_ending(
                last_heartbeat, local_heartbeat.host
            )  # read before its report is looked for
            if has_reported_its_end(store, rank):
                del waiting[rank]
            elif ending:
                dead.append(LostProcess(last_heartbeat, True, ending))
                del waiting[rank]
            elif (
                newest_heartbeat := read_heartbeat(store, rank)
            ) is not None and newest_heartbeat.count > last_heartbeat.count:
                del waiting[rank]
        time.sleep(max(0.1, SEARCH_PAUSE_PER_PROCESS * size))
    dead += [
        LostProcess(heartbeat, True, f"gave no sign of life for {timeout:g} s")
        for heartbeat in waiting.values()
    ]
    if dead:
        return dead
    newest_heartbeats = [
        read_heartbeat(store, rank) or heartbeat for rank, heartbeat in first_heartbeats.items()
    ]
    return [
        LostProcess(heartbeat, False, "does not come")
        for heartbeat in newest_heartbeats
        if heartbeat.exchanges < local_heartbeat.exchanges
    ]


def _describe_ending(heartbeat: Heartbeat, host: str) -> str | None:
    """Describes how a process on this machine ended. Returns None if it still runs, if it is on
    another machine, or if the operating system does not say.
    """
    if heartbeat.host != host or not heartbeat.pid or not Path("/proc/self/stat").exists():
        return None
    with suppress(OSError, IndexError):
        state = Path(f"/proc/{heartbeat.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return {"Z": "died", "X": "died", "T": "was stopped by a signal"}.get(state)
    return "died"


def error_to_json(error: BaseException) -> dict[str, Any]:
    if isinstance(error, IsotypeError):
        return {
            "kind": type(error).__name__,
            "message": error.message,
            "code": error.code,
            "fix": error.fix,
        }
    kind = type(error).__name__
    message = first_line(error)
    return {"kind": kind, "message": kind if message == kind else f"{kind}: {message}"}


def error_from_json(report: dict[str, Any], *, process_name: str | None = None) -> BaseException:
    """Decodes an error that another process reported. An error that is not an IsotypeError becomes
    a RunError.

    process_name  the name of the process that raised the error, for the message
    """
    if report["kind"] == "KeyboardInterrupt":
        return KeyboardInterrupt()
    kind = getattr(errors, report["kind"], RunError)
    message = f"{process_name}: {report['message']}" if process_name else report["message"]
    return kind(message, code=report.get("code"), fix=report.get("fix"))
