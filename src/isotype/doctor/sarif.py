"""Findings as SARIF 2.1.0, the format in which code hosts show findings beside the lines they are about.

Source  https://docs.oasis-open.org/sarif/sarif/v2.1.0/
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from .. import __version__
from ..finding import Finding, Severity
from ..pages import page

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
