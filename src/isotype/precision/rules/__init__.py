"""Finds contradictions between precision settings before anything is loaded. Imports no torch; the doctor uses the same rules.

A file holds the rules about one thing; importing it registers them.
"""

from __future__ import annotations

from ...finding import Finding
from ...pages import docstring_page
from . import values, weights
from .rule import RULES, Facts, Setting

__all__ = ["RULES", "Facts", "Setting", "check", "codes", "page", "values", "weights"]


def check(facts: Facts) -> list[Finding]:
    """Every finding of every rule, by code."""
    return [finding for code in codes() for finding in RULES[code](facts)]


def codes() -> list[str]:
    return sorted(RULES)


def page(code: str) -> str | None:
    """The page of a rule, from its docstring."""
    return docstring_page(code, RULES[code]) if code in RULES else None
