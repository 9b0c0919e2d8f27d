"""Runs code under a trace. The code is the body of a `with isotype.trace(model):` block, or a
program that is given as `SCRIPT.py [args]` or `FILE.py:FUNCTION`.
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
from .context import make_finding
from .tracer import Tracer

# the files of the frames between a program and the command that runs it
_ISOTYPE_FILES = (*OBSERVER_FOLDERS, "<frozen runpy>")


class trace:
    """Traces the dtype of every floating-point tensor while the block runs. Afterwards `findings`
    contains the dtype errors, and the faults that raised no error.

        with isotype.trace(model) as seen:
            train(model)
        for finding in seen.findings:
            print(finding.render())

    model  the model whose parameters and modules are known by their names from the start. Without
           this argument, their names are known only after they have run for the first time

    A dtype error inside the block keeps its type and message. The explanation is added to the error
    as a note.
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self._tracer = Tracer(model)
        self._failure: Finding | None = None
        self._silent_findings: list[Finding] = []

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
            self._failure = self._tracer.failures.explain_exception(error)
        self._silent_findings = self._tracer.findings()
        self._tracer.provenance.clear_origins()

    @property
    def failure(self) -> Finding | None:
        """Returns the explanation of the dtype error that ended the block, or None if there was no
        such error.
        """
        return self._failure

    @property
    def findings(self) -> list[Finding]:
        """Returns the findings, the worst first. A fault is left out if the explanation of the
        error already describes it.
        """
        findings = list(self._silent_findings)
        if self._failure is not None:
            findings = [
                finding
                for finding in findings
                if finding.code != self._failure.code and finding.cause != self._failure.cause
            ]
            findings.insert(0, self._failure)
        return sort_findings(findings)


@dataclass(frozen=True, slots=True)
class Target:
    """The program to run, which is a script or a function in a file."""

    path: Path
    function: str | None

    @classmethod
    def parse(cls, text: str) -> Target:
        """Parses `train.py` or `train.py:run`.

        Raises  UsageError if there is no such file, or it is no Python file
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
    """The result of a traced program. It consists of the trace, and the exception that ended the
    program.
    """

    session: trace
    error: BaseException | None

    @property
    def findings(self) -> list[Finding]:
        findings = list(self.session.findings)
        if (
            self.error is not None
            and self.session.failure is None
            and not isinstance(self.error, SystemExit)
        ):
            frames = reversed(traceback.extract_tb(self.error.__traceback__))
            frame = next(
                (
                    frame
                    for frame in frames
                    if not frame.filename.startswith((*_ISOTYPE_FILES, TORCH_FOLDER))
                ),
                None,
            )
            location = Place(file=frame.filename, line=frame.lineno) if frame else Place()
            findings.append(
                make_finding(
                    "TR000",
                    location,
                    error=(
                        f"{type(self.error).__name__}: {''.join(str(self.error).splitlines()[:1])}"
                    ),
                )
            )
        return findings

    @property
    def status(self) -> int:
        """Returns the exit status of the program."""
        code = self.error.code if isinstance(self.error, SystemExit) else self.error
        if isinstance(code, int):
            return code
        return int(code is not None)


def run_traced(target: Target, arguments: Sequence[str] = ()) -> Outcome:
    """Runs a program and traces its dtypes. If the program raises an exception, the exception is
    stored in the outcome and not raised again.

    Raises  UsageError if the file has no such function
    """
    with run_as_main(target, arguments):
        session = trace()
        error: BaseException | None = None
        try:
            with session:
                if target.function is None:
                    runpy.run_path(str(target.path), run_name="__main__")
                else:
                    get_member(load_module(str(target.path)), target.function, target.path.name)()
        except (KeyboardInterrupt, UsageError):
            raise
        except BaseException as exception:
            error = exception
    return Outcome(session, error)


def plain_traceback(error: BaseException) -> str:
    """Returns the traceback without the frames of Isotype. The note that explains the error is left
    out too, because the finding contains the same explanation.
    """
    formatted = traceback.TracebackException.from_exception(error)
    link: traceback.TracebackException | None = formatted
    while link is not None:
        link.stack = traceback.StackSummary.from_list(
            [frame for frame in link.stack if not frame.filename.startswith(_ISOTYPE_FILES)]
        )
        link.__notes__ = None
        link = link.__cause__ or link.__context__
    return "".join(formatted.format()).rstrip()


@contextmanager
def run_as_main(target: Target, arguments: Sequence[str]) -> Iterator[None]:
    """Sets sys.argv and sys.path as `python SCRIPT.py args` does."""
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
    """Redirects the program's output to stderr, so that stdout contains only the report. This
    includes output that is written directly to the file descriptor.
    """
    sys.stdout.flush()
    saved_stdout = os.dup(1)
    os.dup2(2, 1)
    stream = sys.stdout
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = stream
        sys.stdout.flush()
        os.dup2(saved_stdout, 1)
        os.close(saved_stdout)
