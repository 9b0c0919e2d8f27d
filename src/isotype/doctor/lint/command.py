"""One run of `isotype lint`: configuration and options together, files found, linted, perhaps mended, perhaps executed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ...finding import Finding
from ...interrupted import leaving
from .config import LintConfig, check_codes, find_pyproject, load
from .files import python_files
from .fix import apply_edits
from .grade import Grade
from .prove.command import SECONDS, proved
from .rule import Edit, FixSafety, all_rules
from .run import Found, lint_files


@dataclass(frozen=True, slots=True)
class LintRun:
    """What came out: findings (after fixes), files read, fixes made, codes of the rules that ran.

    unsaid  how many findings are only possible, and left out
    runs    what was executed, in words; "" where nothing was
    """

    findings: list[Finding]
    files: int
    fixed: int
    rules: list[str]
    unsaid: int = 0
    runs: str = ""

    @property
    def subject(self) -> str:
        mended = f", {self.fixed} fixed" if self.fixed else ""
        unsaid = f", {self.unsaid} possible (--possible)" if self.unsaid else ""
        runs = f", {self.runs}" if self.runs else ""
        files, rules = (f"{n} {what}{'s' * (n != 1)}" for n, what in ((self.files, "file"), (len(self.rules), "rule")))
        return f"{files}, {rules}{mended}{runs}{unsaid}"


def lint_command(
    paths: Sequence[Path],
    *,
    config_file: Path | None = None,
    select: Sequence[str] = (),
    extend_select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    exclude: Sequence[str] = (),
    possible: bool = False,
    fix: Literal["safe", "unsafe"] | None = None,
    prove: bool = False,
    seconds: float = SECONDS,
) -> LintRun:
    """Options given here replace `select` of the configuration and add to its other lists.

    prove    execute, in a process of its own, what can be cut out of the files
    seconds  for all that is executed together

    Raises  UsageError for a path, code or configuration that means nothing.
    """
    config = settings(
        paths[0], config_file=config_file, select=select, extend_select=extend_select, ignore=ignore, exclude=exclude, possible=possible
    )
    named = tuple(path.resolve() for path in paths if path.is_dir())
    config = replace(config, named=named, files=frozenset(path.resolve() for path in paths if path.is_file()))
    files = list(python_files(paths, config.exclude, config.root))
    active = config.active(by_name=bool(config.files))
    found = lint_files(files, config, prove=prove)
    fixed = 0
    if fix:
        shown = [f for f in found if f.evidence.grade is not Grade.POSSIBLE and f.asked]
        fixed = _mend(shown, unsafe=fix == "unsafe")
        found = lint_files(files, config, prove=prove) if fixed else found
    runs = ""
    if prove:
        found, runs = proved(found, seconds=seconds)
        found = [f for f in found if f.evidence.grade is Grade.PROVED or f.asked]
    shown = found if config.possible else [f for f in found if f.evidence.grade is not Grade.POSSIBLE]
    return LintRun([f.finding for f in shown], len(files), fixed, active, len(found) - len(shown), runs)


def settings(
    near: Path,
    *,
    config_file: Path | None = None,
    select: Sequence[str] = (),
    extend_select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    exclude: Sequence[str] = (),
    possible: bool = False,
) -> LintConfig:
    """The configuration for `near`, with what the command line adds."""
    config = load(config_file if config_file else find_pyproject(near))
    return replace(
        config,
        select=check_codes(select, "--select") or config.select,
        extend_select=config.extend_select + check_codes(extend_select, "--extend-select"),
        ignore=config.ignore + check_codes(ignore, "--ignore"),
        exclude=config.exclude + tuple(exclude),
        possible=config.possible or possible,
    )


def _mend(found: Sequence[Found], *, unsafe: bool) -> int:
    """Writes the files that have an edit of the wanted safety; how many edits were made."""
    edits: dict[str, list[Edit]] = defaultdict(list)
    for item in found:
        safety = all_rules()[item.finding.code].fix_safety if item.edit else FixSafety.NONE
        if item.edit and item.finding.place.file and (safety is FixSafety.SAFE or (unsafe and safety is FixSafety.UNSAFE)):
            edits[item.finding.place.file].append(item.edit)
    made = files = 0
    with leaving(lambda: f"{files} of {len(edits)} files to be mended were written"):
        for file, wanted in edits.items():
            changed, count = apply_edits(Path(file).read_bytes(), wanted)
            if count:
                Path(file).write_bytes(changed)
                made += count
            files += 1
    return made


def describe_rules(as_json: bool) -> str:
    """Every rule on a line: code, name, severity, whether it is on, whether it can mend."""
    rows = [
        {"code": r.code, "name": r.name, "severity": str(r.severity), "on": r.on, "fix": str(r.fix_safety)} for r in all_rules().values()
    ]
    if as_json:
        return json.dumps({"rules": rows}, indent=1)
    width = max(len(str(row["name"])) for row in rows)
    return "\n".join(
        f"{row['code']}  {row['name']:<{width}}  {row['severity']:<7}  {'on ' if row['on'] else 'off'}"
        + ("" if row["fix"] == "none" else f"  {row['fix']} fix")
        for row in rows
    )
