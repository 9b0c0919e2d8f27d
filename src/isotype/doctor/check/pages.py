"""The pages of `check`'s codes: the docstrings of its rules, CF018 and CF096 and CF099."""

from __future__ import annotations

from ...pages.docstrings import docstring_page
from . import rules
from .rules import autocast_regions

_OTHERS = {
    "CF096": """# CF096: a key or value that Isotype's schema of a run refuses

Unknown keys are refused, since a typo would have no effect. `isotype schema` prints every key.
""",
    "CF099": """# CF099: a file cannot be read

The file looks like a configuration and does not parse (the line is named), or holds nothing that isotype check knows. Nothing in
it was checked.
""",
}


_OTHERS[autocast_regions.CODE] = docstring_page(autocast_regions.CODE, autocast_regions.autocast_around_backward)


def codes() -> list[str]:
    return sorted([*rules.RULES, *_OTHERS])


def page(code: str) -> str | None:
    return _OTHERS.get(code) or rules.page(code)
