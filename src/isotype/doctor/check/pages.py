"""The pages of `check`'s codes: the docstrings of its rules, and CF000, CF098, CF099."""

from __future__ import annotations

from . import rules

_OTHERS = {
    "CF098": """# CF098: a key is given twice

The later value wins in JSON and in PyYAML, and nothing is printed. Remove one.
""",
    "CF099": """# CF099: a file cannot be read

The file looks like a configuration and does not parse (the line is named), or holds nothing that isotype check knows. Nothing in
it was checked.
""",
}


def codes() -> list[str]:
    return sorted([*rules.RULES, *_OTHERS])


def page(code: str) -> str | None:
    return _OTHERS.get(code) or rules.page(code)
