"""`isotype doctor PATH_OR_LOG` chooses the parts of the doctor that apply to a path or a log.

check    runs on configurations and on the settings in programs
explain  runs on logs

The parts `kernels`, `conform` and `trace` import or run the user's code. So the doctor does not
start these parts itself. For Triton kernels, autograd functions and training scripts, it only
prints the command that checks them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import UsageError
from ..finding import Finding, Severity
from ..wording import pluralise
from .check.checker import SKIPPED_FOLDERS, check, format_record, may_be_configuration

_LOG_SUFFIXES = (".log", ".err", ".out")  # endings of files that are read as logs
_MAX_SOURCE_BYTES = 2_000_000  # larger source files are not read
_TRITON_KERNEL = re.compile(r"^\s*@(?:triton\.)?jit\b", re.MULTILINE)
_AUTOGRAD_FUNCTION = re.compile(r"^class (\w+)\((?:[\w.]*autograd\.)?Function\):", re.MULTILINE)
_BUILD_FUNCTION = re.compile(r"^def build\(\)", re.MULTILINE)
_TRAINING_CALL = re.compile(r"\.backward\(|Trainer\(|\.fit\(")
_TOP_LEVEL_STATEMENT = re.compile(r"^(?:if __name__|for |with |while |\w[\w.]*\()", re.MULTILINE)


@dataclass
class Examination:
    """The result of one part of the doctor. If the part did not run, `subject` says why, or
    contains the command that the user can run.

    subject  a description of what was examined
    table    a table that is printed above the findings
    """

    part: str
    subject: str
    findings: list[Finding] = field(default_factory=list)
    was_examined: bool = True
    table: str = ""


def examine_path(path: Path) -> list[Examination]:
    """Runs the parts of the doctor that apply to this file or folder. For parts that would run the
    user's code, it only suggests the commands.

    Raises  UsageError for a path that does not exist
    """
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    files = list(_list_files(path))
    sources = {
        file: text
        for file in files
        if file.suffix == ".py" and (text := _read_source(file)) is not None
    }
    is_single_file = path.is_file() and not may_be_configuration(path.name)
    logs = [
        file
        for file in files
        if (is_single_file or file.suffix in _LOG_SUFFIXES) and not _is_binary(file)
    ]
    examinations = []
    if path.is_dir() or not logs:
        examinations.append(_check_configurations(path))
    if logs:
        examinations.append(_explain_logs(logs))
    return [
        *examinations,
        *_suggest_commands(
            {file: text for file, text in sources.items() if file == path or not _is_test(file)}
        ),
    ]


def examine_log(lines: Iterable[str]) -> Examination:
    """Explains a log that comes from standard input or an argument."""
    from .explain import explain

    return Examination("explain", "1 log", explain(lines))


def _list_files(path: Path) -> Iterator[Path]:
    """Returns the regular files under a path, without pipes and broken links."""
    if path.is_file():
        yield path
        return
    for directory, folders, names in os.walk(path):
        folders[:] = sorted(
            folder
            for folder in folders
            if not folder.startswith(".") and folder not in SKIPPED_FOLDERS
        )
        yield from (file for name in sorted(names) if (file := Path(directory, name)).is_file())


def _is_binary(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return b"\0" in stream.read(4096)
    except OSError:
        return True


def _read_source(file: Path) -> str | None:
    try:
        if file.stat().st_size <= _MAX_SOURCE_BYTES:
            return file.read_text(encoding="utf-8", errors="replace")
        return None
    except OSError:
        return None


def _is_test(file: Path) -> bool:
    return bool(
        {"test", "tests", "benchmark", "benchmarks", "examples"} & set(file.parts)
    ) or file.name.startswith("test_")


def _check_configurations(path: Path) -> Examination:
    try:
        checked = check([str(path)])
    except UsageError as error:
        if path.is_file():
            return Examination("check", "no configuration", was_examined=False)
        return Examination("check", f"left out: {error.message}", was_examined=False)
    if not checked.files:
        return Examination("check", "no file that may be a configuration", was_examined=False)
    files = pluralise(checked.files, "configuration file")
    subject = f"{files}, {pluralise(len(checked.records), 'run')}"
    examination = Examination("check", subject, list(checked.findings))
    if len(checked.records) == 1:
        examination.table = format_record(checked.records[0])
    return examination


def _explain_logs(logs: list[Path]) -> Examination:
    from .explain import explain

    findings: list[Finding] = []
    for log in logs:
        with log.open(encoding="utf-8", errors="replace") as lines:
            findings += [
                finding
                for finding in explain(lines, source=str(log))
                if finding.severity > Severity.NOTE or len(logs) == 1
            ]
    return Examination("explain", pluralise(len(logs), "log"), findings)


def _suggest_commands(sources: dict[Path, str]) -> Iterator[Examination]:
    """Suggests the commands that run the user's code."""
    kernels = [
        file for file, text in sources.items() if "triton" in text and _TRITON_KERNEL.search(text)
    ]
    functions = [
        (file, name) for file, text in sources.items() for name in _AUTOGRAD_FUNCTION.findall(text)
    ]
    scripts = [
        file
        for file, text in sources.items()
        if _TRAINING_CALL.search(text) and _TOP_LEVEL_STATEMENT.search(text)
    ]
    if kernels:
        yield _suggest_command(
            "kernels", str(kernels[0]), len(kernels), "more file", " with Triton kernels"
        )
    if functions:
        file, name = functions[0]
        if _BUILD_FUNCTION.search(sources[file]):
            target = f"{file}:build"
        else:
            target = f"{file}:build, where build() returns ({name}, inputs)"
        yield _suggest_command("conform", target, len(functions), "more autograd function")
    if scripts:
        yield _suggest_command("trace", str(scripts[0]), len(scripts), "more training script")


def _suggest_command(
    part: str, target: str, count: int, counted_noun: str, suffix: str = ""
) -> Examination:
    more = f" ({pluralise(count - 1, counted_noun)}{suffix})" if count > 1 else ""
    return Examination(part, f"isotype doctor {part} {target}{more}", was_examined=False)
