"""The wordings of dtype errors, as templates: `forms.tsv`, which recognise.py matches in its order."""

from __future__ import annotations

from pathlib import Path

_TABLE = Path(__file__).with_name("forms.tsv").read_text(encoding="utf-8")

# operator, template. `<x>` is a dtype named x; everything else is a regular expression.
FORMS: tuple[tuple[str, str], ...] = tuple(
    (operator, form) for operator, _, form in (line.partition("\t") for line in _TABLE.splitlines() if not line.startswith("#"))
)
