"""Docstrings in the API reference: sentences become text; aligned lines (`name  dtype[shape]
note`) stay as they are written.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

_SPECIAL = re.compile(r"([*_|\\])")
_CODE = re.compile(r"(`[^`]+`)")


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Sphinx's event `autodoc-process-docstring`: changes `lines` in place to reStructuredText."""
    lines[:] = as_restructured_text(lines)


def as_restructured_text(lines: list[str]) -> list[str]:
    """Paragraphs become text with code spans; a paragraph with a column or an indented line becomes
    a literal block.
    """
    out: list[str] = []
    for empty, group in groupby(lines, key=lambda line: not line.strip()):
        if empty:
            continue
        paragraph = list(group)
        if any(
            re.search(r"\S {2,}\S", line) or line.startswith((" ", "```", "- ", "* "))
            for line in paragraph
        ):
            out += ["::", "", *("   " + line for line in paragraph), ""]
        else:
            out += [*(_text(line) for line in paragraph), ""]
    return out


def _text(line: str) -> str:
    return "".join(
        f"`{part}`" if part.startswith("`") and len(part) > 2 else _SPECIAL.sub(r"\\\1", part)
        for part in _CODE.split(line)
    )
