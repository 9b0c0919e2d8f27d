"""`Finding`: the form in which every part of Isotype reports a fault, such as the doctor and the preflight.

A `Finding` answers five questions: what (code, message), where (place), why (cause), what was declared, what to do (fix).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class Severity(IntEnum):
    """Ordered so that `max` is the worst."""

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
    """Where a finding stands: a file and line, a symbol (function, setting, module path), or both."""

    file: str | None = None
    line: int | None = None
    column: int | None = None
    symbol: str | None = None

    def __str__(self) -> str:
        spot = self.file or ""
        if spot and self.line is not None:
            spot += f":{self.line}"
        return "  ".join(part for part in (self.symbol, spot) if part)

    def as_json(self) -> dict[str, Any]:
        return {k: v for k in ("file", "line", "column", "symbol") if (v := getattr(self, k)) is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One fault, its place, its cause and its fix.

    code      stable, two or three letters and three digits; `isotype doctor explain CODE` prints its page
    severity  error: it fails or trains wrongly; warning: it will, for some caller; note: worth knowing
    details   further facts, each a label and a value, printed one a line
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

    def as_json(self) -> dict[str, Any]:
        given = {
            "code": self.code,
            "severity": str(self.severity),
            "message": self.message,
            "place": self.place.as_json(),
            "cause": self.cause,
            "declared": self.declared,
            "observed": self.observed,
            "fix": self.fix,
            "details": dict(self.details),
            "page": self.page,
        }
        return {key: value for key, value in given.items() if value not in (None, {}, "")}

    def render(self) -> str:
        """The finding as plain text, one fact a line."""
        facts: list[tuple[str, str | None]] = [("where", str(self.place)), *self.details]
        facts += [("declared", self.declared), ("observed", self.observed), ("cause", self.cause), ("fix", self.fix), ("more", self.page)]
        width = max(len(label) for label, _ in facts) + 2
        lines = [f"{self.severity} {self.code} {self.message}"]
        for label, value in facts:
            if value:
                first, *rest = str(value).splitlines()
                lines.append(f"  {label:<{width}}{first}")
                lines += [f"  {'':<{width}}{line}" for line in rest]
        return "\n".join(lines)


def listed(names: Sequence[str], most: int = 6) -> str:
    """`a, b, c, d and 3 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Stable order: severity, then file and line as given."""
    return sorted(findings, key=lambda f: (-f.severity, f.place.file or "", f.place.line or 0))


def exit_code(findings: Iterable[Finding], fail_on: Severity = Severity.ERROR) -> int:
    """0 when nothing is at or above `fail_on`, else 1."""
    return int(any(f.severity >= fail_on for f in findings))
