"""Findings as SARIF 2.1.0, with paths relative to the repository, for code-scanning pages."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ... import __version__
from ...finding import Finding, Severity, worst_first
from ...pages import page

_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "note"}


def repository_root(start: Path) -> Path:
    """The nearest folder above with .git, else the folder itself."""
    return next((folder for folder in (start, *start.parents) if (folder / ".git").exists()), start)


def as_sarif(findings: Sequence[Finding]) -> str:
    root = repository_root(Path.cwd())
    codes = sorted({f.code for f in findings})
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": "isotype check", "version": __version__, "rules": [_rule(code) for code in codes]}},
                "originalUriBaseIds": {"SRCROOT": {"description": {"text": "the repository's root"}}},
                "results": [_result(f, codes, root) for f in worst_first(findings)],
            }
        ],
    }
    return json.dumps(log, indent=1)


def _rule(code: str) -> dict[str, Any]:
    text = page(code) or f"# {code}"
    title = text.partition("\n")[0].removeprefix(f"# {code}").lstrip(": ")
    return {"id": code, "shortDescription": {"text": title or code}, "help": {"text": text, "markdown": text}}


def _result(finding: Finding, codes: list[str], root: Path) -> dict[str, Any]:
    text = ". ".join(part.rstrip(".") for part in (finding.message, finding.cause, f"Fix: {finding.fix}" if finding.fix else None) if part)
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": codes.index(finding.code),
        "level": _LEVELS[finding.severity],
        "message": {"text": text},
    }
    if finding.place.file:
        uri = os.path.relpath(Path(finding.place.file).resolve(), root)
        location: dict[str, Any] = {"artifactLocation": {"uri": Path(uri).as_posix(), "uriBaseId": "SRCROOT"}}
        if finding.place.line:
            location["region"] = {"startLine": finding.place.line}
        result["locations"] = [{"physicalLocation": location}]
    return result
