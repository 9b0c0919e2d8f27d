"""The pages of `explain`'s codes: the docstrings of the families, and EX000."""

from __future__ import annotations

from ...pages.docstrings import docstring_page
from . import families  # noqa: F401  they register themselves
from .family import FAMILIES

_NOT_DTYPE = """# EX000: not a dtype error

The text holds an error (or none), and nothing in it speaks of a disagreement between dtypes. Shapes, devices, memory and missing keys are
other matters; isotype says so rather than guess.

If you think it is one after all: paste the whole traceback, from its first line, or run the program under `isotype doctor trace`.
"""


def codes() -> list[str]:
    return sorted({"EX000", *(code for code, _ in FAMILIES.values())})


def page(code: str) -> str | None:
    if code == "EX000":
        return _NOT_DTYPE
    return next((docstring_page(code, function) for known, function in FAMILIES.values() if known == code), None)
