"""`isotype ...` in a fork of this process, which has everything imported: a real process, without seven seconds of imports."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HANGS = 300.0  # seconds after which a run of two seconds is taken to hang, also on a machine that has other things to do
CRASHED, HUNG = 99, -999


@dataclass(frozen=True)
class Ended:
    """status: the exit status, negative for a signal, CRASHED for an exception nobody expected, HUNG; output: stdout and stderr."""

    status: int
    output: str
    seconds: float

    @property
    def error(self) -> str:
        """What the command line said last: its error, without the lines before."""
        return self.output[self.output.rfind("isotype: ") :].strip() if "isotype: " in self.output else ""

    @property
    def clear(self) -> bool:
        """A message a user can act on: our own words and a fix, no traceback."""
        return "Traceback" not in self.output and self.error.startswith("isotype: ")


class Child:
    """A command in another process: `kill` it, `wait` for it."""

    def __init__(self, arguments: Sequence[str], log: Path, *, before: Callable[[], None] | None = None,
                 after: Callable[[], None] | None = None) -> None:  # fmt: skip
        self.log, self._started = log, time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _command(arguments, log, before, after)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        pid, how = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(how) if pid else None

    def wait(self, seconds: float = HANGS, *, kill_after: float | None = None, once: Callable[[], bool] | None = None) -> Ended:
        """Waits for the end; SIGKILL when it hangs, or `kill_after` seconds after its start or after `once()` came true."""
        killed, counted_from = False, None if once else self._started
        while (status := self.poll()) is None:
            since = time.monotonic() - self._started
            if counted_from is None and once is not None and once():
                counted_from = time.monotonic()
            if kill_after is not None and counted_from is not None and time.monotonic() - counted_from >= kill_after and not killed:
                self.kill()
                killed = True
            if since >= seconds:
                self.kill()
                os.waitpid(self.pid, 0)
                status = HUNG
                break
            time.sleep(0.0005)
        return Ended(status, self.log.read_text(errors="replace") if self.log.exists() else "", time.monotonic() - self._started)


def run(arguments: Sequence[str], log: Path, *, before: Callable[[], None] | None = None) -> Ended:
    return Child(arguments, log, before=before).wait()


def elsewhere(work: Callable[[], None]) -> None:
    """Does `work` in a fork and waits. Raises RuntimeError when it fails there.

    What computes must not be done in this process: libraries' thread pools do not survive a fork.
    """
    pid = os.fork()
    if pid == 0:
        status = CRASHED
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        raise RuntimeError("a step of the preparation failed")


def _command(arguments: Sequence[str], log: Path, before: Callable[[], None] | None, after: Callable[[], None] | None) -> None:
    """Never returns: `os._exit`, so that nothing of the parent's runs a second time."""
    status = CRASHED
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        sys.argv = ["isotype", *arguments]
        if before is not None:
            before()
        from isotype.cli.app import main

        main()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            if after is not None:
                after()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)
