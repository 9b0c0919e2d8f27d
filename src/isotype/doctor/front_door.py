"""`isotype doctor PATH_OR_LOG`: looks at what it is given and runs the parts of the doctor that apply.

check    configurations, and the settings of programs
explain  logs
kernels  files that define Triton kernels, imported and compiled in a process of their own: a file may wait for input, exit, crash or never
         end when it is imported, which ends only this process; `static` leaves them out

conform and trace run code, which their user must choose: autograd functions and training scripts are named with the command.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..finding import Finding, Place, Severity
from .check.collect import SKIPPED_FOLDERS, may_be_configuration

SECONDS = 120.0  # for all kernels together
_LOGS = (".log", ".err", ".out")
_LONGEST = 2_000_000  # bytes of a source file that is looked into
_KERNEL = re.compile(r"^\s*@(?:triton\.)?jit\b", re.MULTILINE)
_AUTOGRAD_FUNCTION = re.compile(r"^class (\w+)\((?:[\w.]*autograd\.)?Function\):", re.MULTILINE)
_BUILD = re.compile(r"^def build\(\)", re.MULTILINE)
_TRAINS = re.compile(r"\.backward\(|Trainer\(|\.fit\(")
_RUNS = re.compile(r"^(?:if __name__|for |with |while |\w[\w.]*\()", re.MULTILINE)

Tell = Callable[[str], None]


@dataclass
class Visit:
    """One part's visit: what it looked at, in words, and what it found; or, where it did not look, why, or the command that would.

    shown  what is printed above the findings
    """

    part: str
    subject: str
    findings: list[Finding] = field(default_factory=list)
    looked_at: bool = True
    shown: str = ""


def visit(path: Path, *, static: bool = False, seconds: float = SECONDS, tell: Tell = lambda line: None) -> list[Visit]:
    """seconds  for the kernels of all files together; what is not reached is counted in the subject
    tell     is told what is being looked at, a line at a time

    Raises  UsageError for a path that does not exist.
    """
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    files = list(_files(path))
    sources = {f: text for f in files if f.suffix == ".py" and (text := _source(f)) is not None}
    logs = [f for f in files if (_is_log(f) if path.is_file() else f.suffix in _LOGS) and not _binary(f)]
    visits = []
    if path.is_dir() or not logs:
        tell("check   configurations")
        visits.append(_check(path))
    if logs:
        tell(f"explain {count(len(logs), 'log')}")
        visits.append(_explain(logs))
    if kernels := sorted((f for f, text in sources.items() if "triton" in text and _KERNEL.search(text)), key=_is_test):
        visits.append(_not_imported(kernels) if static else _kernels(kernels, seconds, tell))
    return [*visits, *_commands({f: text for f, text in sources.items() if f == path or not _is_test(f)})]


def visit_log(lines: Iterable[str]) -> Visit:
    """A log that is no file."""
    from .explain import explain

    return Visit("explain", "1 log", explain(lines))


def count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _files(path: Path) -> Iterator[Path]:
    """Regular files: no pipe, no link to nowhere."""
    if path.is_file():
        yield path
        return
    for here, folders, names in os.walk(path):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in SKIPPED_FOLDERS)
        yield from (file for name in sorted(names) if (file := Path(here, name)).is_file())


def _is_log(file: Path) -> bool:
    return file.suffix in _LOGS or not may_be_configuration(file.name)


def _binary(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return b"\0" in stream.read(4096)
    except OSError:
        return True


def _source(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace") if file.stat().st_size <= _LONGEST else None
    except OSError:
        return None


def _is_test(file: Path) -> bool:
    return bool({"test", "tests", "benchmark", "benchmarks", "examples"} & set(file.parts)) or file.name.startswith("test_")


def _check(path: Path) -> Visit:
    from .check.check import check, table

    try:
        found = check([str(path)])
    except UsageError as error:
        if path.is_file():
            return Visit("check", "no configuration", looked_at=False)
        return Visit("check", f"left out: {error.message}", looked_at=False)
    if not found.files:
        return Visit("check", "no file that may be a configuration", looked_at=False)
    subject = f"{count(found.files, 'configuration file')}, {count(len(found.records), 'run')}"
    return Visit("check", subject, list(found.findings), shown=table(found.records[0]) if len(found.records) == 1 else "")


def _explain(logs: list[Path]) -> Visit:
    from .explain import explain

    findings: list[Finding] = []
    for log in logs:
        with log.open(encoding="utf-8", errors="replace") as lines:
            findings += [f for f in explain(lines, source=str(log)) if f.severity > Severity.NOTE or len(logs) == 1]
    return Visit("explain", count(len(logs), "log"), findings)


def _kernels(files: list[Path], seconds: float, tell: Tell) -> Visit:
    if importlib.util.find_spec("triton") is None:
        what = f"{count(len(files), 'file')} with Triton kernels, and no Triton here: pip install 'isotype[kernels]'"
        return Visit("kernels", what, looked_at=False)
    tell(f"kernels {count(len(files), 'file')}")
    done = compile_apart(files, seconds=seconds, tell=tell)
    subject = (
        f"{count(done.kernels, 'Triton kernel')} in {count(len(files) - done.not_reached, 'file')}, {count(done.compiled, 'compilation')}"
    )
    if done.not_reached:
        subject += f"; {count(done.not_reached, 'file')} not reached in {seconds:.0f} s (--seconds)"
    return Visit("kernels", subject, [*done.findings, *(_left_out(file, why) for file, why in done.left_out)])


def _left_out(file: Path, why: str) -> Finding:
    return Finding(
        code="KN000",
        severity=Severity.NOTE,
        message=f"its kernels were not compiled: {why}",
        place=Place(file=str(file)),
        fix="isotype doctor kernels package.module, where the file is part of a package",
    )


def _not_imported(files: list[Path]) -> Visit:
    return Visit("kernels", f"{count(len(files), 'file')} with Triton kernels, not imported (--static)", looked_at=False)


def _commands(sources: dict[Path, str]) -> Iterator[Visit]:
    """What only its user can run, with the command."""
    functions = [(file, name) for file, text in sources.items() for name in _AUTOGRAD_FUNCTION.findall(text)]
    scripts = [file for file, text in sources.items() if _TRAINS.search(text) and _RUNS.search(text)]
    if functions:
        more = f" ({count(len(functions) - 1, 'more autograd function')})" if len(functions) > 1 else ""
        file, name = functions[0]
        target = f"{file}:build" if _BUILD.search(sources[file]) else f'{file}:{name} --inputs "..."'
        yield Visit("conform", f"isotype doctor conform {target}{more}", looked_at=False)
    if scripts:
        more = f" ({count(len(scripts) - 1, 'more training script')})" if len(scripts) > 1 else ""
        yield Visit("trace", f"isotype doctor trace {scripts[0]}{more}", looked_at=False)


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
    from .kernels.target import check_target

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
