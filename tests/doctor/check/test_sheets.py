"""Rules that are sheets: every name in a test or a text stands for something, since a name that does not is silently absent."""

from __future__ import annotations

import re
from pathlib import Path
from string import Formatter

import pytest

from isotype.doctor.check.rules import RULES
from isotype.doctor.check.rules import base as sheets
from isotype.doctor.check.settings import ROLES, Document, Facts, Record
from isotype.doctor.sheets import Section, sections

FOLDER = Path(sheets.__file__).parent
WORDS = {"ranks": "error|warning|note", "fields": r"set \w+|shows|cause|fix|today|holds"}
SECTIONS = [section for path in sorted(FOLDER.glob("*.txt")) for section in sections(path, **WORDS)]
KINDS = ("on", "off", "given", "under", "by", "deepspeed", "has")


def known(name: str, made: set[str]) -> bool:
    """Whether a sheet may use this name."""
    if name in made or name in sheets._SHARED or name in ROLES:
        return True
    if any(name.endswith(ending) and known(name.removesuffix(ending), made) for ending in sheets._READINGS):
        return True
    kind, _, rest = name.partition(" ")
    if kind in KINDS and rest:
        return rest in ROLES if kind == "by" else bool(re.fullmatch(r"[\w.]+(, [\w.]+)*", rest))
    owner = name.partition(".")[0]
    return owner in made or owner == "device" or bool(re.fullmatch(r"\w+(\.\w+)+(, \w+(\.\w+)+)*", name))


def names_of(section: Section) -> tuple[set[str], list[str]]:
    """What a section makes, and every name that it uses."""
    made: set[str] = set()
    used: list[str] = []
    for entry in section.entries:
        tests = [test for _, test, _ in entry.fields] + [test for test, _ in entry.ranks]
        for test in filter(None, tests):
            for term in re.split(r" and | or ", test):
                used.append(re.split(r" ~ | == | = ", term.removeprefix("not "))[0])
        for name, _, text in entry.fields:
            kind, _, own = name.partition(" ")
            if kind in ("let", "set"):
                made.add(own)
            if kind == "set":
                used.append(text)
            elif kind == "shows":
                used += [one for group in text.split(", ") for one in group.split("|")]
            else:
                used += [n for _, field, _, _ in Formatter().parse(text) if field for n in (field.split("|")[:-1] or [field])]
        used += [n for _, field, _, _ in Formatter().parse(entry.title) if field for n in [field]]
    return made, used


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.code)
def test_every_name_stands_for_something(section):
    made, used = names_of(section)
    assert [name for name in used if not known(name, made)] == []
    assert all({"cause", "fix", "shows"} <= {name for name, _, _ in entry.fields} for entry in section.entries[1:])


def test_a_misspelt_name_is_seen():
    (section,) = [s for s in SECTIONS if s.code == "CF073"]
    made, _ = names_of(section)
    assert not known("eihgt", made)
    assert not known("by parametres", made)


def test_a_setting_that_is_written_twice_is_listed_once():
    document = Document("simpletuner", "config.json")
    document.add("model_family", "stable_cascade", 3)
    (finding,) = RULES["CF028"](Record("simpletuner", Facts([document])))
    assert (finding.code, str(finding.severity), finding.place.line) == ("CF028", "error", 3)
    assert [label for label, _ in finding.details] == ["model_family", "today"]
