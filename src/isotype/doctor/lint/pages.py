"""The pages of LT codes: the docstrings of the rules, and of the two codes that `lint` itself emits."""

from __future__ import annotations

from .rule import all_rules
from .suppress import PAGES as OWN_PAGES


def codes() -> list[str]:
    return sorted([*all_rules(), *OWN_PAGES])


def page(code: str) -> str | None:
    """The page as Markdown, or None for a code that does not exist."""
    code = code.upper()
    if code in OWN_PAGES:
        return OWN_PAGES[code]
    rule = all_rules().get(code)
    return rule.page() if rule else None
