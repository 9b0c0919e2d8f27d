"""`with isotype.trace(model):` and what the command line builds on: a trace, its findings, and the end of the traced program."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import TracebackType

import torch

from ...finding import Finding, Place, Severity, worst_first
from .tracer import Tracer


class trace:
    """Follows every floating tensor's dtype while the block runs; `findings` afterwards says what went wrong, also in silence.

        with isotype.trace(model) as seen:
            train(model)
        for finding in seen.findings:
            print(finding.render())

    model  names parameters and modules from the start; without it they are named when they run for the first time
    map    a file: the precision map is drawn there at the end

    A dtype error inside keeps its type and message and carries the explanation as a note.
    """

    def __init__(self, model: torch.nn.Module | None = None, *, map: str | PathLike[str] | None = None) -> None:
        self._tracer = Tracer(model, mapped=map is not None)
        self._map = Path(map) if map is not None else None
        self._failure: Finding | None = None
        self._others: list[Finding] = []

    def __enter__(self) -> trace:
        self._tracer.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._tracer.__exit__(kind, error, traceback)
        ended = error if error is not None and not isinstance(error, (SystemExit, KeyboardInterrupt, GeneratorExit)) else None
        if ended is not None:
            self._failure = self._tracer.failures.escaped(ended)
        self._others = self._tracer.findings()
        for caught in self._tracer.failures.caught(ended):
            if not any(f.code == "TR022" and f.place == caught.place for f in self._others):
                self._others.append(
                    replace(caught, code="TR022", severity=Severity.NOTE, message=f"caught by the program: {caught.message}")
                )
        if self._map is not None:
            self._tracer.picture.write(self._map, self.findings)
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
            found = [f for f in found if f.code != self._failure.code and f.cause != self._failure.cause]
            found.insert(0, self._failure)
        return worst_first(found)


def program_failed(error: BaseException, file: str | None, line: int | None) -> Finding:
    """For an exception that is no dtype error as far as can be seen."""
    text = str(error).splitlines()[0] if str(error) else ""
    return Finding(
        code="TR030",
        severity=Severity.NOTE,
        message=f"the program raised {type(error).__name__}: {text}",
        place=Place(file=file, line=line),
        cause="not a dtype error as far as the trace can see",
    )
