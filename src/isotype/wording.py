"""`counted`: a number with the word that it counts; the first line of an error. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path


def counted(number: int, one: str, many: str | None = None) -> str:
    """`1 row`, `1,234 rows`; `many` where the plural is not `one` with an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def first_line(error: BaseException) -> str:
    """Of the error's message, else its kind. A line that only announces a list, as torch's does, gives the next one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[1 if len(lines) > 1 and lines[0].endswith(":") else 0] if lines else type(error).__name__


_CONTROL = [n for n in (*range(32), *range(127, 160)) if chr(n) not in "\t\n"]
_SHOWN = dict.fromkeys(_CONTROL, "�") | {ord("\r"): None}


def printable(text: str) -> str:
    """Without the control characters that move a terminal's cursor, ring, or start a sequence that changes its colours or title."""
    return text.translate(_SHOWN)


def near_file(name: str, there: Iterable[str]) -> str | None:
    """The name most like `name`, if the two are alike without their endings: `a.jsonl` is not like `b.jsonl`."""
    asked, stems = name.casefold(), {other: _stem(other.casefold()) for other in there}
    close = set(get_close_matches(_stem(asked), set(stems.values()), n=len(stems) or 1))
    alike = [other for other, stem in stems.items() if stem in close]
    return max(alike, key=lambda other: SequenceMatcher(None, asked, other.casefold()).ratio(), default=None)


def _stem(name: str) -> str:
    """`a` of `a.jsonl` and of `a.jsonl.gz`."""
    path = Path(name)
    return Path(path.stem).stem if path.suffix == ".gz" else path.stem
