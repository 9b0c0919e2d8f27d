"""What a rule is: a function from a record to findings, naming the settings, their places and who wins; its docstring is its page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from ....finding import Finding, Place, Severity
from ....pages.docstrings import docstring_page
from ....pages.rules import registered
from ..record import Record
from ..settings import Setting

Rule = Callable[[Record], Iterator[Finding]]
RULES: dict[str, Rule] = {}
ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


rule = partial(registered, RULES)


def found(
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
    place = given[0].place if given else Place()
    return Finding(code="", severity=severity, message=message, place=place, cause=cause, fix=fix, details=tuple(details))


error, warning, note = (partial(found, severity) for severity in (ERROR, WARNING, NOTE))


def page(code: str) -> str | None:
    return docstring_page(code, RULES[code]) if code in RULES else None
