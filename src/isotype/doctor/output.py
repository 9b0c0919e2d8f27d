"""How every command of the doctor answers: worst first on one screen, one JSON object, or SARIF; the exit status says whether it is bad.

SARIF 2.1.0 is the format in which code hosts show findings beside the lines they are about:
https://docs.oasis-open.org/sarif/sarif/v2.1.0/
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from ..errors import UsageError
from ..finding import Finding, Severity, exit_code, worst_first
from ..pages import page
from ..version import __version__

SCREEN = 12  # this many findings are printed in full, further ones in one line each


def as_json(findings: Sequence[Finding], **extra: Any) -> str:
    """`{"findings": [...], "version": ...}` and the fields that the command adds."""
    return json.dumps({"findings": [f.as_json() for f in worst_first(findings)], **extra, "version": __version__}, indent=1)


def as_text(findings: Sequence[Finding], *, subject: str) -> str:
    """Findings worst first; past a screenful each gets one line; a last line counts them."""
    if not findings:
        return f"{subject}: no findings"
    ordered = worst_first(findings)
    blocks = [f.render() for f in ordered[:SCREEN]]
    blocks += ["\n".join(f"{f.severity} {f.code} {f.place}: {f.message}" for f in ordered[SCREEN:])] if len(ordered) > SCREEN else []
    count = Counter(f.severity for f in findings)
    total = ", ".join(f"{count[s]} {s}{'s' if count[s] != 1 else ''}" for s in sorted(count, reverse=True))
    return "\n\n".join([*blocks, f"{subject}: {total}"])


def threshold(fail_on: str) -> Severity:
    """The severity of `--fail-on`, from which on a command exits with 1. Raises  UsageError for another word."""
    try:
        return Severity.parse(fail_on)
    except ValueError as error:
        raise UsageError(f"--fail-on: {error}") from None


def refuse_two_forms(json_output: bool, sarif: bool) -> None:
    """Raises  UsageError where both forms of output were asked for."""
    if json_output and sarif:
        raise UsageError("--json and --sarif: give one of them")


def answer(
    findings: Sequence[Finding],
    *,
    subject: str,
    json_output: bool,
    sarif: bool = False,
    fail_on: Severity = Severity.ERROR,
    **extra: Any,
) -> int:
    """Prints the findings and returns the exit status. `extra` goes into the JSON object only."""
    if sarif:
        print(json.dumps(as_sarif(worst_first(findings)), indent=1))
    else:
        print(as_json(findings, **extra) if json_output else as_text(findings, subject=subject))
    return exit_code(findings, fail_on)


_LEVEL = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "note"}


def repository_root(start: Path) -> Path:
    """The nearest folder above with .git, else the folder itself."""
    return next((folder for folder in (start, *start.parents) if (folder / ".git").exists()), start)


def as_sarif(findings: Sequence[Finding], *, root: Path | None = None) -> dict[str, Any]:
    """One SARIF log with one run. Paths below `root` (the repository) are written relative to it, as code hosts want them.

    A finding without a file has no location: code hosts list it, but show it beside no line.
    """
    codes = sorted({f.code for f in findings})
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": "isotype", "version": __version__, "rules": [_rule(code) for code in codes]}},
                "columnKind": "unicodeCodePoints",
                "results": [_result(f, codes.index(f.code), root or repository_root(Path.cwd())) for f in findings],
            }
        ],
    }


def _rule(code: str) -> dict[str, Any]:
    text = page(code) or f"# {code}"
    title = text.partition("\n")[0].lstrip("# ").removeprefix(code).strip(" :") or code
    return {"id": code, "shortDescription": {"text": title}, "help": {"text": text, "markdown": text}}


def _result(finding: Finding, rule_index: int, root: Path) -> dict[str, Any]:
    told = [finding.message]
    told += [f"{label}: {value}" for label, value in (("cause", finding.cause), ("fix", finding.fix)) if value]
    told += [f"{label}: {value}" for label, value in finding.details if label == "evidence"]
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": rule_index,
        "level": _LEVEL[finding.severity],
        "message": {"text": "\n".join(told)},
    }
    place = finding.place
    if place.file:
        region = {"startLine": place.line or 1} | ({"startColumn": place.column} if place.column else {})
        location: dict[str, Any] = {"physicalLocation": {"artifactLocation": {"uri": _uri(place.file, root)}, "region": region}}
        if place.symbol:
            location["logicalLocations"] = [{"fullyQualifiedName": place.symbol}]
        result["locations"] = [location]
    return result


def _uri(file: str, root: Path) -> str:
    relative = os.path.relpath(Path(file).resolve(), root.resolve())
    return Path(file).resolve().as_uri() if relative.startswith("..") else PurePath(relative).as_posix()
