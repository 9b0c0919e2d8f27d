"""`Finding`: the form in which every part of Isotype reports a fault, such as the doctor and the
preflight.

A `Finding` answers five questions: it says what happened (code, message), where (place), why
(cause), what was declared, and what to do (fix). Every command of the doctor prints its findings
with `print_findings`, which prints the worst findings first, or one JSON object. The command's exit
status is 1 if a finding is severe.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from .errors import UsageError
from .version import __version__
from .wording import pluralise

FULL_FINDINGS = 12  # this many findings are printed in full, further ones in one line each


class Severity(IntEnum):
    """Severities in ascending order: `max` returns the worst."""

    NOTE = 0
    WARNING = 1
    ERROR = 2

    @classmethod
    def parse(cls, text: str) -> Severity:
        try:
            return cls[text.upper()]
        except KeyError:
            raise ValueError(f"severity {text!r}: expected error, warning or note") from None

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The place of a finding: a file and line, a symbol (function, setting, module path), or both."""

    file: str | None = None
    line: int | None = None
    symbol: str | None = None

    def __str__(self) -> str:
        position = self.file or ""
        if position and self.line is not None:
            position += f":{self.line}"
        return "  ".join(part for part in (self.symbol, position) if part)

    def to_dict(self) -> dict[str, Any]:
        return {k: v for k in ("file", "line", "symbol") if (v := getattr(self, k)) is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One fault, its place, its cause and its fix.

    code      two or three letters and three digits, the same in every release; `isotype doctor
              explain CODE` prints its page
    severity  error: the program fails or trains wrongly; warning: it fails or trains wrongly for
              some callers; note: only information
    details   further facts, each a label and a value, printed one per line
    """

    code: str
    severity: Severity
    message: str
    place: Place = field(default_factory=Place)
    cause: str | None = None
    declared: str | None = None
    observed: str | None = None
    fix: str | None = None
    details: tuple[tuple[str, str], ...] = ()

    @property
    def page(self) -> str:
        return f"isotype doctor explain {self.code}"

    def to_dict(self) -> dict[str, Any]:
        fields = {
            "code": self.code,
            "severity": str(self.severity),
            "message": self.message,
            "place": self.place.to_dict(),
            "cause": self.cause,
            "declared": self.declared,
            "observed": self.observed,
            "fix": self.fix,
            "details": dict(self.details),
            "page": self.page,
        }
        return {key: value for key, value in fields.items() if value not in (None, {}, "")}

    def render(self) -> str:
        """Returns the finding as plain text, one fact per line."""
        facts: list[tuple[str, str | None]] = [("where", str(self.place)), *self.details]
        facts += [
            ("declared", self.declared),
            ("observed", self.observed),
            ("cause", self.cause),
            ("fix", self.fix),
            ("more", self.page),
        ]
        width = max(len(label) for label, _ in facts) + 2
        lines = [f"{self.severity} {self.code} {self.message}"]
        for label, value in facts:
            if value:
                first, *rest = str(value).splitlines()
                lines.append(f"  {label:<{width}}{first}")
                lines += [f"  {'':<{width}}{line}" for line in rest]
        return "\n".join(lines)


def join_names(names: Sequence[str], limit: int = 6) -> str:
    """Joins names to a text such as `a, b, c, d and 3 more`."""
    return ", ".join(names[:limit]) + (
        f" and {len(names) - limit} more" if len(names) > limit else ""
    )


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Returns the findings sorted by severity, then by file and line. The sort is stable."""
    return sorted(findings, key=lambda f: (-f.severity, f.place.file or "", f.place.line or 0))


def render_findings(findings: Sequence[Finding], *, subject: str) -> str:
    """Returns the findings as text, the worst first. Findings after the first `FULL_FINDINGS` get
    one line each. The last line gives the number of all findings.
    """
    if not findings:
        return f"{subject}: no findings"
    ordered = sort_findings(findings)
    blocks = [finding.render() for finding in ordered[:FULL_FINDINGS]]
    if remaining := ordered[FULL_FINDINGS:]:
        blocks.append(
            "\n".join(
                f"{finding.severity} {finding.code} {finding.place}: {finding.message}"
                for finding in remaining
            )
        )
    total = ", ".join(
        pluralise(count, str(severity))
        for severity, count in sorted(
            Counter(finding.severity for finding in findings).items(), reverse=True
        )
    )
    return "\n\n".join([*blocks, f"{subject}: {total}"])


def parse_threshold(fail_on: str) -> Severity:
    """Returns the severity that `--fail-on` names: a command exits with 1 for a finding of at least
    this severity. Raises UsageError for an unknown severity.
    """
    try:
        return Severity.parse(fail_on)
    except ValueError as error:
        raise UsageError(f"--fail-on: {error}") from None


def print_findings(
    findings: Sequence[Finding],
    *,
    subject: str,
    json_output: bool,
    fail_on: Severity = Severity.ERROR,
    **extra: Any,
) -> int:
    """Prints the findings as text, or as the JSON object `{"findings": [...], "version": ...}` with
    the fields of `extra`. Returns the exit status.
    """
    if json_output:
        print(
            json.dumps(
                {
                    "findings": [finding.to_dict() for finding in sort_findings(findings)],
                    **extra,
                    "version": __version__,
                },
                indent=1,
            )
        )
    else:
        print(render_findings(findings, subject=subject))
    return int(any(finding.severity >= fail_on for finding in findings))
