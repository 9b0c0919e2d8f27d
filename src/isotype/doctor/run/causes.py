"""Contains the documentation pages for the codes that `isotype doctor run` reports. This module
imports no torch.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ...pages.sheets import Section, read_sections

SHEET = Path(__file__).with_name("causes.txt")


@cache
def _sections() -> dict[str, Section]:
    fields = "cause|fix|declared|observed"
    sections = read_sections(SHEET, rank_pattern="error|warning|note", field_pattern=fields)
    return {section.code: section for section in sections}


def codes() -> list[str]:
    return sorted(_sections())


def page(code: str) -> str | None:
    section = _sections().get(code)
    return None if section is None else section.to_page()
