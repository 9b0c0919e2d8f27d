"""`with isotype.trace(model):`, and a program run under it: `SCRIPT.py [args]` or
`FILE.py:FUNCTION`, as it would run by itself.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from ...errors import UsageError
from ...finding import Finding, Place, sort_findings
from ...observe.origin import OBSERVER_FOLDERS, TORCH_FOLDER
from ..loading import get_member, load_module
from .context import say
from .tracer import Tracer

# files of frames between a program and the command that runs it
_OURS = (*OBSERVER_FOLDERS, "<frozen runpy>")


class trace:
    """Follows every floating tensor's dtype while the block runs; `findings` afterwards says what
    went wrong, also in silence.

        with isotype.trace(model) as seen:
            train(model)
        for finding in seen.findings:
            print(finding.render())

    model  names parameters and modules from the start; without it they are named when they run for
           the first time
    A dtype error inside keeps its type and message and carries the explanation as a note.
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self._tracer = Tracer(model)
        self._failure: Finding | None = None
        self._others: list[Finding] = []

    def __enter__(self) -> trace:
        self._tracer.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._tracer.__exit__(kind, error, traceback)
        if error is not None and not isinstance(
            error, (SystemExit, KeyboardInterrupt, GeneratorExit)
        ):
            self._failure = self._tracer.failures.escaped(error)
        self._others = self._tracer.findings()
        self._tracer.provenance.forget()

    @property
    def failure(self) -> Finding | None:
        """The explanation of the dtype error that left the block, if one did."""
        return self._failure

    @property
    def findings(self) -> list[Finding]:
        """Worst first. A fault that the explanation of the failure contains is not repeated."""
        found = list(self._others)
        if self._failure is not None:
            found = [
                f for f in found if f.code != self._failure.code and f.cause != self._failure.cause
            ]
            found.insert(0, self._failure)
        return sort_findings(found)


@dataclass(frozen=True, slots=True)
class Target:
    """A script, or a function of a file."""

    path: Path
    function: str | None

    @classmethod
    def parse(cls, text: str) -> Target:
        """`train.py` or `train.py:run`.

        Raises  UsageError when there is no such file, or it is no Python file
        """
        path = Path(text)
        function = None
        if not path.is_file() and ":" in text:
            head, _, function = text.rpartition(":")
            path = Path(head)
        if not path.is_file():
            raise UsageError(
                f"{path}: no such file",
                fix=(
                    "isotype doctor trace SCRIPT.py [args], or isotype doctor trace"
                    " FILE.py:FUNCTION"
                ),
            )
        if path.suffix not in (".py", ""):
            raise UsageError(f"{path}: not a Python file")
        if function is not None and not function.isidentifier():
            raise UsageError(f"{text}: {function!r} is not the name of a function")
        return cls(path.resolve(), function)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a traced program left: the trace, and the exception that ended it."""

    seen: trace
    error: BaseException | None

    @property
    def findings(self) -> list[Finding]:
        found = list(self.seen.findings)
        if (
            self.error is not None
            and self.seen.failure is None
            and not isinstance(self.error, SystemExit)
        ):
            frames = reversed(traceback.extract_tb(self.error.__traceback__))
            spot = next(
                (f for f in frames if not f.filename.startswith((*_OURS, TORCH_FOLDER))), None
            )
            place = Place(file=spot.filename, line=spot.lineno) if spot else Place()
            found.append(
                say(
                    "TR000",
                    place,
                    error=(
                        f"{type(self.error).__name__}: {''.join(str(self.error).splitlines()[:1])}"
                    ),
                )
            )
        return found

    @property
    def status(self) -> int:
        """The program's own exit status."""
        code = self.error.code if isinstance(self.error, SystemExit) else self.error
        if isinstance(code, int):
            return code
        return int(code is not None)


def run(target: Target, arguments: Sequence[str] = ()) -> Outcome:
    """Runs it under a trace; its exceptions end it, not us.

    Raises  UsageError when the file has no such function
    """
    with _as_main(target, arguments):
        seen = trace()
        error: BaseException | None = None
        try:
            with seen:
                if target.function is None:
                    runpy.run_path(str(target.path), run_name="__main__")
                else:
                    get_member(load_module(str(target.path)), target.function, target.path.name)()
        except (KeyboardInterrupt, UsageError):
            raise
        except BaseException as raised:
            error = raised
    return Outcome(seen, error)


def plain_traceback(error: BaseException) -> str:
    """The traceback as it would be without the trace: without Isotype's frames, and without a note,
    as the finding replaces it.
    """
    shown = traceback.TracebackException.from_exception(error)
    link: traceback.TracebackException | None = shown
    while link is not None:
        link.stack = traceback.StackSummary.from_list(
            [frame for frame in link.stack if not frame.filename.startswith(_OURS)]
        )
        link.__notes__ = None
        link = link.__cause__ or link.__context__
    return "".join(shown.format()).rstrip()


@contextmanager
def _as_main(target: Target, arguments: Sequence[str]) -> Iterator[None]:
    """sys.argv and sys.path as `python SCRIPT.py args` would have them."""
    argv = sys.argv
    path = list(sys.path)
    sys.argv = [str(target.path), *arguments]
    sys.path.insert(0, str(target.path.parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """What the program prints goes to stderr, at the level of file descriptors too, so that stdout
    holds our answer only.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    stream = sys.stdout
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = stream
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
