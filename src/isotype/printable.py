"""Makes text that a model wrote safe to print in a terminal."""

from __future__ import annotations

_CONTROL = [n for n in (*range(32), *range(127, 160)) if chr(n) not in "\t\n"]
_SHOWN = dict.fromkeys(_CONTROL, "�") | {ord("\r"): None}


def printable(text: str) -> str:
    """Without the control characters that move a terminal's cursor, ring, or start a sequence that changes its colours or title."""
    return text.translate(_SHOWN)
