"""`isotype doctor PATH`: every part of the doctor that applies to what lies there, and one summary.

check   configurations       lint    Python files
explain logs (*.log, *.err)  kernels files that define Triton kernels; these are imported, which `static` leaves out
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import UsageError
from ..finding import Finding, Place, Severity
from .lint.files import SKIPPED_FOLDERS

_KERNEL = re.compile(r"^\s*@(?:triton\.)?jit\b", re.MULTILINE)
_LOGS = (".log", ".err")
_LONGEST = 2_000_000  # bytes of a source file that may hold kernels


@dataclass
class Visit:
    """One part's visit: what it looked at, in words, and what it found."""

    part: str
    subject: str
    findings: list[Finding] = field(default_factory=list)


def visit(path: Path, *, static: bool = False) -> list[Visit]:
    """Raises  UsageError for a path that does not exist."""
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    files = list(_files(path))
    python = [f for f in files if f.suffix == ".py"]
    visits = [_check(path)]
    if python:
        visits.append(_lint(path))
    if logs := [f for f in files if f.suffix in _LOGS]:
        visits.append(_explain(logs))
    if kernels := [f for f in python if _has_kernels(f)]:
        visits.append(_not_imported(kernels) if static else _kernels(kernels))
    return visits


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for here, folders, names in os.walk(path):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in SKIPPED_FOLDERS)
        yield from (Path(here, name) for name in sorted(names))


def _has_kernels(file: Path) -> bool:
    try:
        if file.stat().st_size > _LONGEST:
            return False
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "triton" in text and _KERNEL.search(text) is not None


def _check(path: Path) -> Visit:
    from .check.check import check

    found = check([str(path)])
    return Visit("check", f"{found.files} configuration files, {len(found.records)} runs", list(found.findings))


def _lint(path: Path) -> Visit:
    from .lint.command import lint_command

    run = lint_command([path])
    return Visit("lint", run.subject, run.findings)


def _explain(logs: list[Path]) -> Visit:
    from .explain import explain

    findings: list[Finding] = []
    for log in logs:
        with log.open(encoding="utf-8", errors="replace") as lines:
            findings += [f for f in explain(lines, source=str(log)) if f.severity > Severity.NOTE]
    return Visit("explain", f"{len(logs)} logs", findings)


def _kernels(files: list[Path]) -> Visit:
    try:
        from .kernels.target import check_target
    except ImportError:
        return Visit("kernels", f"{len(files)} files with Triton kernels, and no Triton here: pip install 'isotype[kernels]'")
    findings, kernels, compiled = [], 0, 0
    for file in files:
        try:
            report = check_target(str(file))
        except UsageError as error:
            findings.append(_left_out(file, error.message))
            continue
        findings += report.findings
        kernels, compiled = kernels + len(report.kernels), compiled + report.compiled
    return Visit("kernels", f"{kernels} Triton kernels in {len(files)} files, {compiled} compilations", findings)


def _left_out(file: Path, why: str) -> Finding:
    return Finding(
        code="KN000",
        severity=Severity.NOTE,
        message=f"its kernels were not compiled: {why}",
        place=Place(file=str(file)),
        fix="isotype kernels package.module, where the file is part of a package",
    )


def _not_imported(files: list[Path]) -> Visit:
    return Visit("kernels", f"{len(files)} files with Triton kernels, not imported (--static)")
