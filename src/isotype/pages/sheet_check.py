"""Checks a section of a text file of rules when it is loaded: every name must be known, and every
variable must be used.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from .sheets import (
    NAME_SIGNS,
    Entry,
    Facts,
    Field,
    Section,
    SheetError,
    Term,
    names_in_text,
    parse_test,
)


class _SectionCheck:
    """Checks one section.

    available       the variables that are defined at the current line
    used_variables  the variables that are used
    """

    def __init__(self, section: Section, facts: type[Facts], variables: Collection[str]) -> None:
        self.section = section
        self.facts = facts
        self.available = set(variables)
        self.used_variables: set[str] = set()

    def refuse(self, line: int, message: str) -> None:
        raise SheetError(self.section.sheet, line, f"{self.section.code}: {message}")

    def check_name(self, name: str, line: int) -> None:
        variables = self.facts.find_variables(name, self.available)
        if variables is None:
            self.refuse(line, f"unknown name {name!r}")
        else:
            self.used_variables |= variables

    def check_text(self, text: str, line: int) -> None:
        for name in names_in_text(text):
            self.check_name(name, line)

    def check_test(self, test: str | None, line: int) -> None:
        if test is None:
            return
        for alternative in parse_test(test):
            for term in alternative:
                self.check_term(term, line)

    def check_term(self, term: Term, line: int) -> None:
        self.check_name(term.name, line)
        if term.sign in NAME_SIGNS:
            self.check_name(term.value, line)
        values = self.facts.values.get(term.name)
        if term.sign != "=" or values is None or term.name in self.available:
            return
        for value in term.value.split(", "):
            if value not in values:
                self.refuse(line, f"{term.name} is never {value!r}")

    def check_names(self, text: str, line: int) -> None:
        """Checks a list of names. In `one|another` each name must be known."""
        self.check_text(text, line)
        for name in re.split(r", |\|", text):
            if name and "{" not in name:
                self.check_name(name, line)


def check_section(
    section: Section,
    facts: type[Facts],
    *,
    row_variables: Mapping[str, str] | None = None,
    lists: Collection[str] = (),
    shared: Collection[str] = (),
) -> None:
    """Raises an error for unknown names and for unused variables.

    row_variables  the variables of a row of the header
    lists          the fields whose text is a list of names
    shared         the sections that `+` lines may include
    Raises         SheetError
    """
    row = row_variables or {}
    check = _SectionCheck(section, facts, [*row, *section.parameters])
    head, *entries = section.entries
    defined = dict.fromkeys(check.available, section.line)
    available_by_let: dict[
        str, set[str]
    ] = {}  # variable -> the variables that are defined above its first line
    for line in head.fields:
        kind, _, variable = line.name.partition(" ")
        if kind == "let":
            check.available = available_by_let.setdefault(variable, set(check.available))
        if kind in ("let", "set"):
            check.check_test(line.test, line.line)
            if kind == "set":
                _check_assignment(check, line, row)
            else:
                check.check_text(line.text, line.line)
            defined.setdefault(variable, line.line)
        check.available = set(defined)
    for line in head.fields:
        if line.name.partition(" ")[0] not in ("let", "set", "parameters"):
            check.check_test(line.test, line.line)
            check.check_text(line.text, line.line)
    for entry in entries:
        _check_entry(check, entry, lists, shared)
    unused = [variable for variable in defined if variable not in check.used_variables]
    if unused:
        check.refuse(defined[unused[0]], f"the variable {unused[0]!r} is not used")


def _check_assignment(check: _SectionCheck, line: Field, row: Mapping[str, str]) -> None:
    """Checks the name after the colon of a `set` line. If the line contains `{name}`, its value is
    inserted first.
    """
    check.check_text(line.text, line.line)
    fact = line.text
    for variable, value in row.items():
        fact = fact.replace(f"{{{variable}}}", value)
    check.check_name(fact, line.line)


def _check_entry(
    check: _SectionCheck, entry: Entry, lists: Collection[str], shared: Collection[str]
) -> None:
    if entry.is_include:
        check.check_test(entry.test, entry.line)
        if entry.title not in shared:
            check.refuse(entry.line, f"no shared section {entry.title!r}")
        return
    check.check_text(entry.title, entry.line)
    for line in (*entry.ranks, *entry.fields):
        check.check_test(line.test, line.line)
        if line.name in lists:
            check.check_names(line.text, line.line)
        elif line.name:
            check.check_text(line.text, line.line)
