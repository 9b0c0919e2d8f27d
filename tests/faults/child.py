"""`isotype ...` in a fork of this process, which has everything imported: a real process, without
seven seconds of imports.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# seconds after which a run of two seconds is taken to hang, also on a machine that has other things
# to do
HANGS = 300.0
CRASHED, HUNG = 99, -999
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}


def fork(work: Callable[[], object]) -> int:
    """Begins `work` in a fork, which ends with CRASHED where it raises, and returns its id.

    What computes must not be done in this process: libraries' thread pools do not survive a fork.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        status = CRASHED
        try:
            work()
            status = 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(status)  # so that nothing of the parent's runs a second time
    return pid


def elsewhere(work: Callable[[], object]) -> int:
    """Does `work` in a fork, waits, and returns its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(fork(work), 0)[1])


@dataclass(frozen=True)
class Ended:
    """status: the exit status, negative for a signal, CRASHED for an exception nobody expected,
    HUNG; output: stdout and stderr.
    """

    status: int
    output: str
    seconds: float

    @property
    def error(self) -> str:
        """What the command line said last: its error, without the lines before."""
        return (
            self.output[self.output.rfind("isotype: ") :].strip()
            if "isotype: " in self.output
            else ""
        )

    @property
    def clear(self) -> bool:
        """A message a user can act on: our own words and a fix, no traceback."""
        return "Traceback" not in self.output and self.error.startswith("isotype: ")

    def told(self, until: str) -> str:
        """The error on one line, up to `until`."""
        return " ".join(self.error.removeprefix("isotype: ").partition(until)[0].split())


class Child:
    """A command in another process."""

    def __init__(
        self, arguments: Sequence[str], log: Path, *, before: Callable[[], None] | None = None
    ) -> None:
        self.log, self._started = log, time.monotonic()
        self.pid = fork(lambda: _command(arguments, log, before))

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def ended(self, *, wait: bool = False) -> Ended | None:
        """How it ended, or None while it runs."""
        pid, how = os.waitpid(self.pid, 0 if wait else os.WNOHANG)
        said = self.log.read_text(errors="replace") if pid and self.log.exists() else ""
        return (
            Ended(os.waitstatus_to_exitcode(how), said, time.monotonic() - self._started)
            if pid
            else None
        )


def wait(
    children: Sequence[Child],
    *,
    kill: Sequence[int] = (),
    after: float = 0.0,
    once: Callable[[], bool] = lambda: True,
) -> list[Ended]:
    """Waits for the end of all. Those that hang are killed, and those in `kill` are `after` seconds
    after `once()` came true.
    """
    begun, counted_from, left, found = (
        time.monotonic(),
        None,
        dict(enumerate(children)),
        dict[int, Ended](),
    )
    while left:
        now = time.monotonic()
        if counted_from is None and once():
            counted_from = now
        for number, child in list(left.items()):
            if ended := child.ended():
                found[number] = ended
            elif now - begun > HANGS:
                child.kill()
                child.ended(wait=True)
                found[number] = Ended(HUNG, child.log.read_text(errors="replace"), HANGS)
            elif number in kill and counted_from is not None and now - counted_from >= after:
                child.kill()
            if number in found:
                del left[number]
        time.sleep(0.0005)
    return [found[number] for number in range(len(children))]


def run(arguments: Sequence[str], log: Path, *, before: Callable[[], None] | None = None) -> Ended:
    return wait([Child(arguments, log, before=before)])[0]


def _command(arguments: Sequence[str], log: Path, before: Callable[[], None] | None) -> None:
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


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal is on its way


# --- The file operations of a process, counted and met: an audit hook hears of each right before it
# is done.


def on_operation(act: Callable[[], object]) -> Callable[[], None]:
    """For a child: `act` right before each change of files."""
    return lambda: sys.addaudithook(
        lambda event, arguments: act() if _is_change(event, arguments) else None
    )


def before_operation(number: int, act: Callable[[], None]) -> Callable[[], None]:
    """For a child: `act` right before it changes files for the `number`th time."""
    seen = [0]

    def meet() -> None:
        seen[0] += 1
        if seen[0] == number:  # what `act` does is counted too
            act()

    return on_operation(meet)


def _is_change(event: str, arguments: tuple[Any, ...]) -> bool:
    if event != "open":
        return event in _CHANGES
    path, _, flags = arguments
    outside = not isinstance(path, str | Path) or str(path).startswith(("/dev/", "/proc/"))
    return not outside and isinstance(flags, int) and bool(flags & WRITES)
