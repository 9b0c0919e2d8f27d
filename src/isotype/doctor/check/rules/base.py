"""What a rule is: a function from a record to findings, naming the settings, their places and who wins; its docstring is its page."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ....finding import Finding, Severity
from ....pages.docstrings import docstring_page
from ..record import Record
from ..settings import Setting

Rule = Callable[[Record], Iterator[Finding]]
RULES: dict[str, Rule] = {}
ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


def rule(code: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        assert code not in RULES, code
        RULES[code] = function
        return function

    return register


def found(
    code: str,
    severity: Severity,
    message: str,
    *settings: Setting | None,
    cause: str,
    fix: str,
    wins: str | None = None,
    holds: str | None = None,
) -> Finding:
    """A finding at the first setting, listing all of them.

    wins   what happens today, when two settings disagree
    holds  the versions the rule is known for
    """
    given = list({(s.key, s.file, s.line): s for s in settings if s is not None}.values())
    details: list[tuple[str, str]] = []
    for setting in given:
        label = setting.key if all(setting.key != known for known, _ in details) else f"{setting.key}, also"
        details.append((label, setting.shown))
    if wins:
        details.append(("today", wins))
    if holds:
        details.append(("holds for", holds))
    finding = Finding(code=code, severity=severity, message=message, cause=cause, fix=fix, details=tuple(details))
    return (
        finding
        if not given
        else Finding(code=code, severity=severity, message=message, place=given[0].place, cause=cause, fix=fix, details=tuple(details))
    )


def page(code: str) -> str | None:
    return docstring_page(code, RULES[code]) if code in RULES else None
