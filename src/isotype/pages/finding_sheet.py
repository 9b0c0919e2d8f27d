"""Reads the text files that contain the messages of `isotype doctor trace` and `ampcheck`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..finding import Finding, Place, Severity
from .sheet_check import check_section
from .sheets import Facts, Section, SheetError, read_sections


class FindingFacts(Facts):
    """The names that texts and conditions of a finding can use: its variables, and `symbol`, the
    function or module where the fault is.
    """

    fact_functions = {"symbol": lambda self: self.location.symbol}

    def __init__(self, variables: Mapping[str, Any], location: Place) -> None:
        super().__init__(variables)
        self.location = location


_FINDING_FIELDS = ("cause", "fix", "declared", "observed")


def load_finding_formatter(path: Path) -> Callable[..., Finding]:
    """Reads a text file that has one section for each code, and returns a function that creates
    findings from these texts. This function, `format_finding(code, place, details, **variables)`,
    uses the first entry of the code whose condition is true. A parameter that a call leaves out
    counts as empty.

    Raises  SheetError
    """
    by_code: dict[str, Section] = {}
    for section in read_sections(
        path, rank_pattern="error|warning|note", field_pattern="|".join(_FINDING_FIELDS)
    ):
        check_section(section, FindingFacts)
        by_code[section.code] = section

    def format_finding(
        code: str, location: Place, details: tuple[tuple[str, str], ...] = (), /, **values: Any
    ) -> Finding:
        section = by_code[code]
        if unknown := values.keys() - set(section.parameters):
            raise SheetError(
                section.sheet, section.line, f"{code} has no parameter {min(unknown)!r}"
            )
        facts = FindingFacts({**dict.fromkeys(section.parameters, ""), **values}, location)
        severity, entry = next(section.matching_entries(facts))
        texts: dict[str, Any] = {name: entry.text(name, facts) or None for name in _FINDING_FIELDS}
        return Finding(
            code=code,
            severity=Severity.parse(severity),
            message=facts.format(entry.title),
            place=location,
            details=details,
            **texts,
        )

    return format_finding
