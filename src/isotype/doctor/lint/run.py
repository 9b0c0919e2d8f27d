"""Lints files: reads, asks the rules, drops what is suppressed, answers Findings."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

from ...finding import Finding, Place, Severity
from .config import LintConfig
from .dataflow.events import Scenario
from .files import read
from .grade import Evidence, Grade, evidence_for
from .prove.job import REFUSED
from .repository import look_again, repository_of
from .rule import Edit, Hit, Rule, all_rules
from .source import SourceFile
from .suppress import PAGES, Suppression, suppressions

EVIDENCE = "evidence"  # the label under which a finding states its grade
READ = ((EVIDENCE, "proved: by reading the file"),)
PART = 32  # files handed to a process at once
GARBAGE = 2_000_000  # objects more than after the last collection: some 500 MB
PARALLEL_FROM = 200  # files: below this, starting a second process costs more than it saves


@dataclass(frozen=True, slots=True)
class Found:
    """A finding with its evidence, the scenario that it supposes and, where its rule has one, the edit that mends it.

    asked  False for a rule that is off: it is told only if it is proved
    """

    finding: Finding
    edit: Edit | None = None
    evidence: Evidence = field(default_factory=lambda: Evidence(Grade.PROVED, "by reading the file"))
    scenario: Scenario | None = None
    asked: bool = True

    def graded(self, evidence: Evidence) -> Found:
        """The same finding on other evidence."""
        severity = Severity.NOTE if evidence.grade is Grade.POSSIBLE else all_rules()[self.finding.code].severity
        severity = self.finding.severity if self.evidence.grade is not Grade.POSSIBLE and evidence.grade is not Grade.POSSIBLE else severity
        details = tuple((label, str(evidence)) if label == EVIDENCE else (label, value) for label, value in self.finding.details)
        return replace(self, finding=replace(self.finding, severity=severity, details=details), evidence=evidence)


def lint_files(paths: Sequence[Path], config: LintConfig, *, prove: bool = False) -> list[Found]:
    """Every finding in these files, of every grade, file by file in the order given; with `prove` also of rules that are off."""
    look_again()
    some = partial(_lint_some, prove=prove, config=config)
    processes = min(os.cpu_count() or 1, 8)
    if len(paths) < PARALLEL_FROM or processes < 2:
        return some(paths)
    parts = [paths[i : i + PART] for i in range(0, len(paths), PART)]
    with ProcessPoolExecutor(processes) as pool:
        return list(chain.from_iterable(pool.map(some, parts)))


def _lint_some(paths: Sequence[Path], *, prove: bool, config: LintConfig) -> list[Found]:
    """File by file, without the cycle collector: looking through each new tree for cycles took 37% of the time, and there are few."""
    found: list[Found] = []
    running = gc.isenabled()
    gc.disable()
    try:
        for path in paths:
            found += _lint_guarded(path, prove=prove, config=config)
            if gc.get_count()[0] > GARBAGE:
                gc.collect()
    finally:
        if running:
            gc.enable()
    return found


def _lint_guarded(path: Path, *, prove: bool, config: LintConfig) -> list[Found]:
    """As `lint_text`, but an internal error in one file becomes a finding of that file and does not end the run."""
    try:
        text = read(path)
        by_name = path.resolve() in config.files
        asked = {*config.active(by_name=by_name), *PAGES}
        found = lint_text(text, path, active=config.active(prove=prove, by_name=by_name), config=config)
        return [f if f.finding.code in asked else replace(f, asked=False) for f in found]
    except SyntaxError as error:
        if _is_newer_python(path, error):
            return [_too_new(path, error)]
        return [_unread(path, f"could not be parsed: {error.msg}", error.lineno)]
    except (UnicodeDecodeError, OSError, RecursionError) as error:
        return [_unread(path, f"could not be parsed: {error}" if str(error) else type(error).__name__, None)]
    except Exception as error:  # an error of the linter in one file is reported; the findings in other files are kept
        where = traceback.extract_tb(error.__traceback__)[-1]
        return [_unread(path, f"a rule failed: {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})", None)]


def _is_newer_python(path: Path, error: SyntaxError) -> bool:
    """Whether it is the syntax of a newer Python: an f-string that 3.12 allows, or what libcst parses where that is installed."""
    if sys.version_info < (3, 12) and (error.msg or "").startswith("f-string"):
        return True
    try:
        import libcst

        libcst.parse_module(path.read_bytes())
        return True
    except Exception:  # whatever it says of what is no Python
        return False


def _too_new(path: Path, error: SyntaxError) -> Found:
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    message = f"not looked at: its syntax is newer than Python {ours}, with which Isotype runs ({error.msg})"
    place = Place(file=str(path), line=error.lineno)
    fix = "run Isotype with the Python that the file is written for"
    return Found(Finding(code="LT000", severity=Severity.NOTE, message=message, place=place, fix=fix, details=READ))


def _unread(path: Path, message: str, line: int | None) -> Found:
    fix = "correct the file, or leave it out with `exclude` in [tool.isotype.lint]"
    return Found(
        Finding(code="LT000", severity=Severity.ERROR, message=message, place=Place(file=str(path), line=line), fix=fix, details=READ)
    )


def lint_text(text: str, path: Path, *, active: Sequence[str], config: LintConfig | None = None) -> list[Found]:
    """The findings of one file's text, of every grade, suppressions applied, by line.

    Raises  SyntaxError when the text is not Python.
    """
    rules = [all_rules()[code] for code in active]
    rules = [rule for rule in rules if any(word in text for word in rule.words)]
    silenced = suppressions(text)
    if not rules and not silenced:
        return []
    try:
        file = SourceFile(str(path), text)
    except ValueError as error:  # null bytes
        raise SyntaxError(str(error)) from error
    ignored = config.ignored_in(path) if config else ()
    found: list[Found] = []
    for rule in rules:
        if ignored and rule.code.startswith(ignored):
            continue
        for hit in rule.visit(file):
            if not rule.in_tests and file.in_a_test(hit.node):
                continue
            last = min(hit.node.end_lineno or hit.node.lineno, hit.node.lineno + 20)
            silent = [s for s in silenced if s.silences(rule.code, hit.node.lineno, last)]  # all of them, so that each counts as used
            if not silent:
                repository = repository_of(path, config.named if config else ())
                evidence = evidence_for(hit, file, path, repository, refused=rule.code in REFUSED)
                if hit.only_reached and evidence.grade is Grade.POSSIBLE:
                    continue
                found.append(Found(_finding(rule, hit, file, evidence), hit.edit, evidence, hit.scenario))
    found += [Found(f) for s in silenced if (f := _about(s, file, active)) is not None]
    return sorted(found, key=lambda f: (f.finding.place.line or 0, f.finding.place.column or 0, f.finding.code))


def _finding(rule: Rule, hit: Hit, file: SourceFile, evidence: Evidence) -> Finding:
    symbol = hit.symbol or file.symbol(hit.node)
    place = Place(file=file.path, line=hit.node.lineno, column=hit.node.col_offset + 1, symbol=symbol)
    lines = file.text.splitlines()
    code = lines[hit.node.lineno - 1].strip() if hit.node.lineno <= len(lines) else ""
    severity = rule.severity if hit.severity is None else hit.severity
    return Finding(
        code=rule.code,
        severity=Severity.NOTE if evidence.grade is Grade.POSSIBLE else severity,
        message=hit.message,
        place=place,
        cause=hit.cause,
        fix=hit.fix,
        details=(("code", code), *hit.details, (EVIDENCE, str(evidence))),
    )


def _about(s: Suppression, file: SourceFile, active: Sequence[str]) -> Finding | None:
    """What is wrong with a suppression, if anything."""
    known = all_rules()
    unknown = [code for code in s.codes if code not in known]
    if not s.codes:
        message = "a suppression names the rules it silences: `# isotype: ignore[LT004] reason`"
    elif unknown:
        message = f"the suppression names {', '.join(unknown)}, which is no rule"
    elif not s.reason:
        message = f"the suppression of {', '.join(s.codes)} has no reason"
    else:
        unused = [code for code in s.codes if code in active and code not in s.used]
        if not unused:
            return None
        message = f"the suppression of {', '.join(unused)} silences nothing"
    place = Place(file=file.path, line=s.line, column=s.column + 1)
    fix = "say why, name the code, or remove the comment"
    return Finding(code="LT099", severity=Severity.NOTE, message=message, place=place, fix=fix, details=READ)
