"""`isotype doctor PATH_OR_LOG`: looks at what it is given and runs the parts of the doctor that
apply.

check    configurations, and the settings of programs
explain  logs

kernels, conform and trace import or run code, which their user must choose: Triton kernels,
autograd functions and training scripts are named with the command.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import UsageError
from ..finding import Finding, Severity
from ..wording import counted
from .check.checker import SKIPPED_FOLDERS, check, may_be_configuration, table

_LOGS = (".log", ".err", ".out")
_LONGEST = 2_000_000  # bytes of a source file that is looked into
_KERNEL = re.compile(r"^\s*@(?:triton\.)?jit\b", re.MULTILINE)
_AUTOGRAD_FUNCTION = re.compile(r"^class (\w+)\((?:[\w.]*autograd\.)?Function\):", re.MULTILINE)
_BUILD = re.compile(r"^def build\(\)", re.MULTILINE)
_TRAINS = re.compile(r"\.backward\(|Trainer\(|\.fit\(")
_RUNS = re.compile(r"^(?:if __name__|for |with |while |\w[\w.]*\()", re.MULTILINE)


@dataclass
class Visit:
    """One part's visit: what it looked at, in words, and what it found; or, where it did not look,
    why, or the command that would.

    shown  what is printed above the findings
    """

    part: str
    subject: str
    findings: list[Finding] = field(default_factory=list)
    looked_at: bool = True
    shown: str = ""


def visit(path: Path) -> list[Visit]:
    """Raises  UsageError for a path that does not exist."""
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    files = list(_files(path))
    sources = {f: text for f in files if f.suffix == ".py" and (text := _source(f)) is not None}
    alone = path.is_file() and not may_be_configuration(path.name)
    logs = [f for f in files if (alone or f.suffix in _LOGS) and not _binary(f)]
    visits = []
    if path.is_dir() or not logs:
        visits.append(_check(path))
    if logs:
        visits.append(_explain(logs))
    return [
        *visits,
        *_commands({f: text for f, text in sources.items() if f == path or not _is_test(f)}),
    ]


def visit_log(lines: Iterable[str]) -> Visit:
    """A log that is no file."""
    from .explain import explain

    return Visit("explain", "1 log", explain(lines))


def _files(path: Path) -> Iterator[Path]:
    """Regular files: no pipe, no link to nowhere."""
    if path.is_file():
        yield path
        return
    for here, folders, names in os.walk(path):
        folders[:] = sorted(
            f for f in folders if not f.startswith(".") and f not in SKIPPED_FOLDERS
        )
        yield from (file for name in sorted(names) if (file := Path(here, name)).is_file())


def _binary(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return b"\0" in stream.read(4096)
    except OSError:
        return True


def _source(file: Path) -> str | None:
    try:
        if file.stat().st_size <= _LONGEST:
            return file.read_text(encoding="utf-8", errors="replace")
        return None
    except OSError:
        return None


def _is_test(file: Path) -> bool:
    return bool(
        {"test", "tests", "benchmark", "benchmarks", "examples"} & set(file.parts)
    ) or file.name.startswith("test_")


def _check(path: Path) -> Visit:
    try:
        found = check([str(path)])
    except UsageError as error:
        if path.is_file():
            return Visit("check", "no configuration", looked_at=False)
        return Visit("check", f"left out: {error.message}", looked_at=False)
    if not found.files:
        return Visit("check", "no file that may be a configuration", looked_at=False)
    subject = f"{counted(found.files, 'configuration file')}, {counted(len(found.records), 'run')}"
    return Visit(
        "check",
        subject,
        list(found.findings),
        shown=table(found.records[0]) if len(found.records) == 1 else "",
    )


def _explain(logs: list[Path]) -> Visit:
    from .explain import explain

    findings: list[Finding] = []
    for log in logs:
        with log.open(encoding="utf-8", errors="replace") as lines:
            findings += [
                f
                for f in explain(lines, source=str(log))
                if f.severity > Severity.NOTE or len(logs) == 1
            ]
    return Visit("explain", counted(len(logs), "log"), findings)


def _commands(sources: dict[Path, str]) -> Iterator[Visit]:
    """What only its user can run, with the command."""
    kernels = [file for file, text in sources.items() if "triton" in text and _KERNEL.search(text)]
    functions = [
        (file, name) for file, text in sources.items() for name in _AUTOGRAD_FUNCTION.findall(text)
    ]
    scripts = [
        file for file, text in sources.items() if _TRAINS.search(text) and _RUNS.search(text)
    ]
    if kernels:
        yield _named("kernels", str(kernels[0]), len(kernels), "more file", " with Triton kernels")
    if functions:
        file, name = functions[0]
        if _BUILD.search(sources[file]):
            target = f"{file}:build"
        else:
            target = f"{file}:build, where build() returns ({name}, inputs)"
        yield _named("conform", target, len(functions), "more autograd function")
    if scripts:
        yield _named("trace", str(scripts[0]), len(scripts), "more training script")


def _named(part: str, target: str, number: int, what: str, kind: str = "") -> Visit:
    more = f" ({counted(number - 1, what)}{kind})" if number > 1 else ""
    return Visit(part, f"isotype doctor {part} {target}{more}", looked_at=False)
