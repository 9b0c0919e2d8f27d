"""Numbers and text as people read them; the first line of an error. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path


def counted(number: int, one: str, many: str | None = None) -> str:
    """`1 row`, `1,234 rows`; `many` where the plural is not `one` with an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """A line for each row, its cells in columns; those in the columns `right` stand at their right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    columns = [str.rjust if i in right else str.ljust for i in range(len(widths))]
    return [
        "  ".join(put(cell, width) for put, cell, width in zip(columns, row, widths)).rstrip()
        for row in rows
    ]


def plain(value: float) -> str:
    """A number in a short form: `2.41`, `0.0002`, `1.2e-05`, `12,300`."""
    if not math.isfinite(value):
        return "not finite"
    absolute = abs(value)
    if 1000 <= absolute < 1e7:
        return f"{value:,.0f}"
    digits = 4 if 1 <= absolute < 1e7 else 3 if 1e-3 <= absolute < 1 else 2
    return f"{value:.{digits}g}"


def percent(value: float) -> str:
    """Three digits: those of a share of 98 to 99% are the ticks of an axis."""
    if abs(value) >= 0.1:
        return f"{100 * value:.3g}%"
    return f"{100 * value:.2g}%"


def size(count: float) -> str:
    """Bytes: `1.2 GB` (10^9)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            if unit == "B" or abs(count) >= 100:
                return f"{count:.0f} {unit}"
            return f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def shown(size: int) -> str:
    """Bytes in binary units: `1.40 GiB`, `83.0 MiB`."""
    gib = size / (1 << 30)
    mib = size / (1 << 20)
    if gib >= 1:
        return f"{gib:.2f} GiB"
    if mib < 100:
        return f"{mib:.1f} MiB"
    return f"{mib:.0f} MiB"


def duration(seconds: float) -> str:
    """`1.5 s`, `2 min 05 s`, `3 h 10 min`."""
    if seconds < 60:
        if seconds < 10:
            return f"{seconds:.1f} s"
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s"


def count(value: float) -> str:
    """`874`, `12.3k`, `4.26M`."""
    for unit in ("", "k", "M", "B"):
        if abs(value) < 1000:
            return f"{value:.3g}{unit}" if unit else f"{value:.0f}"
        value /= 1000
    return f"{value:.3g}T"


def first_line(error: BaseException) -> str:
    """Of the error's message, else its kind. A line that only announces a list, as torch's does,
    gives the next one.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines:
        return lines[1 if len(lines) > 1 and lines[0].endswith(":") else 0]
    return type(error).__name__


_CONTROL = [n for n in (*range(32), *range(127, 160)) if chr(n) not in "\t\n"]
_SHOWN = dict.fromkeys(_CONTROL, "�") | {ord("\r"): None}


def printable(text: str) -> str:
    """Without the control characters that move a terminal's cursor, ring, or start a sequence that
    changes its colours or title.
    """
    return text.translate(_SHOWN)


def near_file(name: str, there: Iterable[str]) -> str | None:
    """The name most like `name`, if the two are alike without their endings: `a.jsonl` is not like
    `b.jsonl`.
    """
    asked = name.casefold()
    stems = {other: _stem(other.casefold()) for other in there}
    close = set(get_close_matches(_stem(asked), set(stems.values()), n=len(stems) or 1))
    alike = [other for other, stem in stems.items() if stem in close]
    return max(
        alike,
        key=lambda other: SequenceMatcher(None, asked, other.casefold()).ratio(),
        default=None,
    )


def _stem(name: str) -> str:
    """`a` of `a.jsonl` and of `a.jsonl.gz`."""
    path = Path(name)
    return Path(path.stem).stem if path.suffix == ".gz" else path.stem
