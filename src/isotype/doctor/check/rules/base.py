"""A rule is a function that receives the precision of a run (a `Record`) and yields findings, which
are the faults that it found. The docstring of the function is the documentation page of the rule's
code. A finding lists the settings that caused the fault, with their locations, and says which of
them takes effect.

Most rules are not written in Python but in text files (`*.txt` in the folder of this module). Each
entry of a file has a condition and several fields. `pages.sheets` parses these files. Rules that
examine every key of a file are Python functions (`keys.py`).

Each of these files is divided into sections. The header of a section may define variables in
several rows, such as `half=bf16 other=fp16; half=fp16 other=bf16`. All entries of the section are
then evaluated once with the variables of each row. The title of an entry becomes the message of the
finding, and the rank of the entry (`error`, `warning` or `note`) becomes its severity. The fields
are `settings` (the settings to list; `one|another` means the first of the two that exists),
`cause`, `fix`, `today` (the effect of the current settings) and `holds` (the versions for which the
rule is known).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from ....finding import Finding, Place, Severity
from ....pages import register_rule
from ....pages.sheet_check import check_section
from ....pages.sheets import Section, read_sections
from ..settings import Record, Setting
from .facts import RuleFacts

# reads the settings of one program and yields what is wrong
Rule = Callable[[Record], Iterator[Finding]]
RULES: dict[str, Rule] = {}

rule = partial(register_rule, RULES)


def make_finding(
    severity: Severity,
    message: str,
    *settings: Setting | None,
    cause: str,
    fix: str,
    current_effect: str | None = None,
    known_versions: str | None = None,
) -> Finding:
    """Returns a finding about the given settings. The location of the finding is the location of
    the first setting.

    current_effect  what happens with the current settings, if two of them disagree
    known_versions  the versions for which the rule is known
    """
    distinct_settings = list(
        {
            (setting.key, setting.file, setting.line): setting
            for setting in settings
            if setting is not None
        }.values()
    )
    details: list[tuple[str, str]] = []
    for setting in distinct_settings:
        if all(setting.key != listed_label for listed_label, _ in details):
            label = setting.key
        else:
            label = f"{setting.key}, also"
        details.append((label, setting.value_and_origin))
    if current_effect:
        details.append(("today", current_effect))
    if known_versions:
        details.append(("holds for", known_versions))
    location = distinct_settings[0].location if distinct_settings else Place()
    return Finding(
        code="",
        severity=severity,
        message=message,
        place=location,
        cause=cause,
        fix=fix,
        details=tuple(details),
    )


make_error = partial(make_finding, Severity.ERROR)


def _parse_rows(section: Section) -> list[dict[str, str]]:
    """Returns the variables that the header of a section defines. Each dict is one set of values.
    If the header defines no variables, the list contains one empty dict.
    """
    return [dict(pair.split("=") for pair in row.split()) for row in section.header.split(";")]


def _find_section(section: Section, record: Record) -> Iterator[Finding]:
    for row in _parse_rows(section):
        facts = RuleFacts(record, row)
        for severity, entry in section.matching_entries(facts):
            names = entry.text("settings", facts).split(", ")
            yield make_finding(
                Severity.parse(severity),
                facts.format(entry.title),
                *map(facts.setting, names),
                cause=entry.text("cause", facts),
                fix=entry.text("fix", facts),
                current_effect=entry.text("today", facts),
                known_versions=entry.text("holds", facts),
            )


def load_sheet(path: Path) -> dict[str, list[Section]]:
    """Reads a text file of rules. Returns a dict from the code of each rule to the sections of the
    file that belong to it. Raises SheetError if the file contains a mistake.
    """
    by_code: dict[str, list[Section]] = {}
    for section in read_sections(
        path, rank_pattern="error|warning|note", field_pattern="settings|cause|fix|today|holds"
    ):
        for row in _parse_rows(section):
            check_section(section, RuleFacts, row_variables=row, lists=("settings",))
        by_code.setdefault(section.code, []).append(section)
    return by_code


def register_sheet(path: Path) -> None:
    """Reads the rules of one file and adds them to `RULES`."""
    for code, sections in load_sheet(path).items():

        def find(record: Record, sections: list[Section] = sections) -> Iterator[Finding]:
            for section in sections:
                yield from _find_section(section, record)

        find.__doc__ = sections[0].page
        rule(code)(find)


for _path in sorted(Path(__file__).parent.glob("*.txt")):
    register_sheet(_path)
