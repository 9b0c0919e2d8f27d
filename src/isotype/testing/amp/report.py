"""The result of a check: findings, the number of trials, and the error that a plain `ampcheck(...)` raises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...doctor.output import as_text
from ...finding import Finding, Severity


class ConformanceError(AssertionError):
    """The function breaks under mixed precision. `report` holds the findings; the message is the whole report."""

    def __init__(self, report: Report) -> None:
        self.report = report
        super().__init__("\n" + report.render())


@dataclass(frozen=True)
class Report:
    """The result of `ampcheck(..., raises=False)`.

    tried    combinations run
    refused  combinations that the function refuses, as plain PyTorch does: setting -> why
    skipped  what could not be looked at, and why
    """

    subject: str
    findings: tuple[Finding, ...]
    tried: int
    refused: tuple[tuple[str, str], ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """No finding of severity warning or error."""
        return not self.at_least(Severity.WARNING)

    def at_least(self, severity: Severity) -> list[Finding]:
        return [f for f in self.findings if f.severity >= severity]

    def codes(self, severity: Severity = Severity.WARNING) -> list[str]:
        """Codes of the findings at or above `severity`, each once."""
        return sorted({f.code for f in self.at_least(severity)})

    def render(self) -> str:
        text = as_text(self.findings, subject=self.subject)
        return f"{text} ({self.tried} combinations run{f', {len(self.refused)} refused' if self.refused else ''})"


def merged(groups: Sequence[tuple[tuple[object, ...], Finding, str]]) -> list[Finding]:
    """One finding for each fault, however many combinations show it.

    groups  (what makes two findings the same fault, the finding, the combination it was seen in)
    """
    first: dict[tuple[object, ...], Finding] = {}
    seen: dict[tuple[object, ...], list[str]] = {}
    for key, finding, where in groups:
        if key not in first or finding.severity > first[key].severity:
            first[key] = finding
        seen.setdefault(key, []).append(where)
    out = []
    for key, finding in first.items():
        places = list(dict.fromkeys(where for where in seen[key] if where))
        if places:
            shown = "; ".join(places[:3]) + (f"; and {len(places) - 3} more" if len(places) > 3 else "")
            out.append(_with_detail(finding, ("seen with", shown)))
        else:
            out.append(finding)
    return out


def _with_detail(finding: Finding, detail: tuple[str, str]) -> Finding:
    return Finding(
        code=finding.code,
        severity=finding.severity,
        message=finding.message,
        place=finding.place,
        cause=finding.cause,
        declared=finding.declared,
        observed=finding.observed,
        fix=finding.fix,
        details=(*finding.details, detail),
    )
