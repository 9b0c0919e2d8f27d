"""Every code that the doctor can emit has a page; those of check and explain have the fixed
sections.
"""

from __future__ import annotations

import re
from pathlib import Path

import isotype
from isotype.pages import page
from tests.api import codes
from tests.api import rules_RULES as RULES

PREFIXES = {
    "doctor/check": "CF",
    "doctor/explain": "EX",
    "doctor/run": "RN",
    "doctor/trace": "TR",
    "doctor/kernels": "KN",
    "testing": "AC",
    "inference/inspection": "MF",
}


def test_every_emitted_code_has_a_page():
    for folder, prefix in PREFIXES.items():
        files = (Path(isotype.__file__).parent / folder).rglob("*.py")
        codes = {
            code for file in files for code in re.findall(rf'"({prefix}\d{{3}})"', file.read_text())
        }
        assert codes, folder
        assert [
            code for code in sorted(codes) if not (page(code) or "").startswith(f"# {code}")
        ] == []


def test_rules_are_asked_in_the_order_of_their_codes():
    assert list(RULES) == sorted(RULES)


def test_pages_have_their_sections():
    for code in [*RULES, *(code for code in codes() if code not in ("EX000", "RN000"))]:
        text = page(code) or ""
        missing = [
            part
            for part in ("**Why it matters.**", "**Example.**", "**What to do.**")
            if part not in text
        ]
        assert not missing, f"{code}: {missing}"


def test_every_rule_is_reached_by_a_case():
    from .contradictions import CASES

    assert set(RULES) - {case.code for case in CASES.values()} == {"CF046"}  # has its own test
