"""How every command of the doctor answers: worst first on one screen, or one JSON object; the exit status says whether it is bad."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..errors import UsageError
from ..finding import Finding, Severity, exit_code, worst_first
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


def answer(
    findings: Sequence[Finding],
    *,
    subject: str,
    json_output: bool,
    fail_on: Severity = Severity.ERROR,
    **extra: Any,
) -> int:
    """Prints the findings and returns the exit status. `extra` goes into the JSON object only."""
    print(as_json(findings, **extra) if json_output else as_text(findings, subject=subject))
    return exit_code(findings, fail_on)
