"""Every code that check and explain can emit has a page in the fixed sections."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import isotype.doctor.check as check_package
import isotype.doctor.explain as explain_package
from isotype.doctor.check import rules as check_pages
from isotype.doctor.check.rules import RULES
from isotype.doctor.explain import sheets as explain_pages


def emitted(package: object, prefix: str) -> set[str]:
    folder = Path(str(package.__file__)).parent
    return {code for file in folder.rglob("*.py") for code in re.findall(rf'"({prefix}\d{{3}})"', file.read_text())}


def test_every_emitted_code_has_a_page():
    assert emitted(check_package, "CF") <= set(check_pages.codes())
    assert emitted(explain_package, "EX") <= set(explain_pages.codes())


def test_rules_are_asked_in_the_order_of_their_codes():
    assert list(RULES) == sorted(RULES)


@pytest.mark.parametrize("code", [*RULES, *[c for c in explain_pages.codes() if c != "EX000"]])
def test_a_page_has_its_sections(code: str):
    page = check_pages.page(code) or explain_pages.page(code) or ""
    assert page.startswith(f"# {code}: ")
    for section in ("**Why it matters.**", "**Example.**", "**What to do.**"):
        assert section in page


def test_every_rule_is_reached_by_a_case():
    from .contradictions import CASES

    assert set(RULES) - {case.code for case in CASES.values()} == {"CF046"}  # has its own test
