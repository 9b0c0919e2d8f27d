"""Files with Triton kernels, imported and compiled in a process of their own.

A file may wait for input, exit, crash or never end when it is imported. That ends only this process, and its output is not shown. Each
file has a time limit, and so have all files together.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...finding import Finding

SILENT = 60.0  # seconds that importing one file, or compiling one kernel for all its dtypes, may take


@dataclass
class Apart:
    """Findings, counts, the files that were left out with the reason, and how many were not reached in time."""

    findings: list[Finding] = field(default_factory=list)
    kernels: int = 0
    compiled: int = 0
    left_out: list[tuple[Path, str]] = field(default_factory=list)
    not_reached: int = 0


def compile_apart(files: Sequence[Path], *, seconds: float, tell: Callable[[str], None] = lambda line: None) -> Apart:
    """tell  is called with a line for each file that is compiled."""
    apart, waiting, until = Apart(), list(files), time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")
    while waiting and time.monotonic() < until:
        ours, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=([str(f) for f in waiting], theirs), daemon=True)
        worker.start()
        theirs.close()
        try:
            _listen(ours, waiting, apart, len(files), until, tell)
        finally:
            worker.kill()
            worker.join()
            ours.close()
    apart.not_reached = len(waiting)
    return apart


def _listen(ours: Connection, waiting: list[Path], apart: Apart, count: int, until: float, tell: Callable[[str], None]) -> None:
    """Reads the output of the process until it has finished, prints nothing for too long, ends, or exceeds the time."""
    doing = "importing it"
    while waiting:
        left = until - time.monotonic()
        if left <= 0:
            return
        try:
            told = ours.recv() if ours.poll(min(left, SILENT)) else None
        except (EOFError, OSError):
            apart.left_out.append((waiting.pop(0), f"{doing} ended the process"))
            return
        if told is None:
            if time.monotonic() < until:
                apart.left_out.append((waiting.pop(0), f"{doing} took more than {SILENT:.0f} s"))
            return
        if isinstance(told, str):
            doing = f"compiling {told}"
            tell(f"kernels {count - len(waiting) + 1}/{count} {waiting[0]}: {told}")
            continue
        findings, kernels, compiled, why = told
        file = waiting.pop(0)
        apart.findings += findings
        apart.kernels, apart.compiled = apart.kernels + kernels, apart.compiled + compiled
        if why:
            apart.left_out.append((file, why))
        doing = "importing it"


def _work(files: list[str], answers: Connection) -> None:
    """The process: one answer a file, the names of its kernels before."""
    from .target import check_target

    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    for file in files:
        answer: tuple[list[Finding], int, int, str | None]
        try:
            report: Any = check_target(file, tell=answers.send)
            answer = (report.findings, len(report.kernels), report.compiled, None)
        except UsageError as error:
            answer = ([], 0, 0, error.message.removeprefix(f"{file}: "))
        except SystemExit:
            answer = ([], 0, 0, "importing it leaves the program (sys.exit, or arguments that are missing)")
        answers.send(answer)
