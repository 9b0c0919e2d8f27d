"""Runs the functions with findings in a separate process, and grades the findings by the results. Only that process needs torch."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from ..grade import Evidence, Grade
from .job import LOSSES, REFUSED, Job, Verdict

if TYPE_CHECKING:
    from ..run import Found

SECONDS = 300.0  # for all that is executed
ONE = 150.0  # for one function, on a busy machine; it computes for a few seconds at most
START = 240.0  # until the process has imported torch, on a busy machine
READY = "ready"


def proved(found: Sequence[Found], *, seconds: float = SECONDS) -> tuple[list[Found], str]:
    """The findings with the grade that executing them gives, and in words what was executed."""
    jobs = {
        i: Job(f.finding.place.file or "", f.finding.place.line or 0, f.finding.code, f.scenario)
        for i, f in enumerate(found)
        if f.scenario is not None and f.finding.code in REFUSED | LOSSES and (f.asked or f.evidence.grade is Grade.REACHED)
    }
    verdicts = dict(zip(jobs, run_apart(list(jobs.values()), seconds=seconds)))
    graded = [_graded(f, verdicts.get(i)) for i, f in enumerate(found)]
    run = [v for v in verdicts.values() if v is not None and v.outcome != "not run"]
    failed = sum(v.outcome in ("failed", "lost") for v in run)
    return graded, f"{len(run)} of {len(jobs)} executed ({failed} failed)" if jobs else "nothing to execute"


def _graded(found: Found, verdict: Verdict | None) -> Found:
    if verdict is None or verdict.outcome == "not run":
        return found
    if verdict.outcome == "held":
        return found.graded(Evidence(Grade.POSSIBLE, verdict.text))
    if found.evidence.grade is Grade.POSSIBLE:  # it fails, and nobody is seen to hand it these dtypes
        return found.graded(replace(found.evidence, why=f"{found.evidence.why}; {verdict.text}"))
    return found.graded(Evidence(Grade.PROVED, verdict.text))


def run_apart(jobs: Sequence[Job], *, seconds: float) -> list[Verdict | None]:
    """A verdict for each job, in order; None for what was not reached in time."""
    verdicts: list[Verdict | None] = []
    until = time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")
    while len(verdicts) < len(jobs) and time.monotonic() < until:
        ours, theirs = context.Pipe(duplex=False)
        with tempfile.TemporaryDirectory(prefix="isotype-") as folder:
            worker = context.Process(target=_work, args=(list(jobs[len(verdicts) :]), folder, theirs), daemon=True)
            worker.start()
            theirs.close()
            try:
                _listen(ours, verdicts, len(jobs), until)
            finally:
                worker.kill()
                worker.join()
                ours.close()
    return verdicts + [None] * (len(jobs) - len(verdicts))


def _listen(ours: Connection, verdicts: list[Verdict | None], count: int, until: float) -> None:
    """Takes answers until all are there, one takes too long, or the process ends; whoever caused that is left out."""
    ready = False
    while len(verdicts) < count:
        left = until - time.monotonic()
        if left <= 0:
            return
        try:
            answer = ours.recv() if ours.poll(min(left, ONE if ready else START)) else None
        except (EOFError, OSError):
            verdicts.append(Verdict("not run", "executing it ended the process"))
            return
        if answer is None:
            verdicts.append(Verdict("not run", f"executing it took more than {ONE:.0f} s"))
            return
        if answer == READY:
            ready = True
        else:
            verdicts.append(answer)


def _work(jobs: list[Job], folder: str, answers: Connection) -> None:
    import os

    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    from .execute import verdict_on  # imports torch
    from .confined import confine  # isort: skip

    confine(folder)
    answers.send(READY)
    for job in jobs:
        answers.send(verdict_on(job))
