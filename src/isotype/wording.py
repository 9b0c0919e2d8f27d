"""Formats numbers and text for people, and takes the first line of an error. This module imports no
torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path


def pluralise(number: int, singular: str, plural: str | None = None) -> str:
    """Returns a number with its noun: `1 row`, `1,234 rows`. Give `plural` if the plural is not
    `singular` with an s.
    """
    if number == 1:
        return f"1 {singular}"
    return f"{number:,} {plural or singular + 's'}"


def align_columns(rows: Sequence[Sequence[str]], right_aligned: Sequence[int] = ()) -> list[str]:
    """Returns a line for each row, with its cells in columns. The columns whose indices are in
    `right_aligned` are right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    columns = [str.rjust if i in right_aligned else str.ljust for i in range(len(widths))]
    return [
        "  ".join(
            justify(cell, width) for justify, cell, width in zip(columns, row, widths)
        ).rstrip()
        for row in rows
    ]


def format_number(value: float) -> str:
    """Returns a number in a short form: `2.41`, `0.0002`, `1.2e-05`, `12,300`."""
    if not math.isfinite(value):
        return "not finite"
    absolute = abs(value)
    if 1000 <= absolute < 1e7:
        return f"{value:,.0f}"
    if 1 <= absolute < 1000:
        digits = 4
    elif 1e-3 <= absolute < 1:
        digits = 3
    else:
        digits = 2
    return f"{value:.{digits}g}"


def format_percent(value: float) -> str:
    """Formats a fraction as a percentage with two or three significant digits. Three digits are
    needed for example for an axis from 98% to 99%.
    """
    if abs(value) >= 0.1:
        return f"{100 * value:.3g}%"
    return f"{100 * value:.2g}%"


def format_bytes(count: float) -> str:
    """Returns a number of bytes in decimal units: `1.2 GB` (10^9)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            if unit == "B" or abs(count) >= 100:
                return f"{count:.0f} {unit}"
            return f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def format_binary_bytes(count: int) -> str:
    """Returns a number of bytes in binary units: `1.40 GiB`, `83.0 MiB`."""
    gib = count / (1 << 30)
    mib = count / (1 << 20)
    if gib >= 1:
        return f"{gib:.2f} GiB"
    if mib < 100:
        return f"{mib:.1f} MiB"
    return f"{mib:.0f} MiB"


def format_duration(seconds: float) -> str:
    """Formats a duration: `1.5 s`, `2 min 05 s`, `3 h 10 min`."""
    if seconds < 60:
        if seconds < 10:
            return f"{seconds:.1f} s"
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s"


def format_compact(value: float) -> str:
    """Formats a number in at most a few characters: `874`, `12.3k`, `4.26M`."""
    for unit in ("", "k", "M", "B"):
        if abs(value) < 1000:
            if unit:
                return f"{value:.3g}{unit}"
            return f"{value:.0f}"
        value /= 1000
    return f"{value:.3g}T"


MAX_ERROR_LENGTH = 600  # characters of another library's error in a message


def first_line(error: BaseException) -> str:
    """Returns the first line of the error's message; without a message, the name of its class. A
    first line that ends in a colon, as some of torch's do, is skipped. A long line, which may quote
    a value of a file, is shortened.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines:
        line = lines[1 if len(lines) > 1 and lines[0].endswith(":") else 0]
        return shorten_middle(line, MAX_ERROR_LENGTH)
    return type(error).__name__


_CONTROL_CODES = [n for n in (*range(32), *range(127, 160)) if chr(n) not in "\t\n"]
_TRANSLATION = dict.fromkeys(_CONTROL_CODES, "�") | {ord("\r"): None}


def remove_control_characters(text: str) -> str:
    """Returns the text without control characters, which could move a terminal's cursor, ring its
    bell, or change its colours or title.
    """
    return text.translate(_TRANSLATION)


def list_names(names: Iterable[object], *, max_names: int = 40, max_length: int = 60) -> str:
    """Lists names from a file for a message: on one line, with limits of their number and length."""
    texts = [" ".join(remove_control_characters(str(name)).split()) for name in names]
    shown = [shorten_middle(text, max_length) for text in texts[:max_names]]
    if len(texts) > max_names:
        shown.append(f"and {len(texts) - max_names:,} more")
    return ", ".join(shown)


def shorten_middle(text: str, max_length: int) -> str:
    """Returns the text with " ... " in place of its middle, if it is longer than `max_length`."""
    if len(text) <= max_length:
        return text
    half = (max_length - 5) // 2
    return f"{text[:half].rstrip()} ... {text[-half:].lstrip()}"


def shorten_lines(text: str, *, max_lines: int, max_length: int) -> str:
    """Returns the text without empty lines, shortened in the middle to a number of lines and
    characters.
    """
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    if len(lines) > max_lines:
        half = max_lines // 2
        lines = [*lines[:half], "...", *lines[-half:]]
    return shorten_middle("\n".join(lines), max_length)


def closest_file_name(name: str, candidates: Iterable[str]) -> str | None:
    """Returns the candidate most similar to `name`; None if none is similar. The endings of the
    names are not compared: `a.jsonl` is not similar to `b.jsonl`.
    """
    requested = name.casefold()
    stems = {candidate: _file_stem(candidate.casefold()) for candidate in candidates}
    close_stems = set(
        get_close_matches(_file_stem(requested), set(stems.values()), n=len(stems) or 1)
    )
    similar = [candidate for candidate, stem in stems.items() if stem in close_stems]
    return max(
        similar,
        key=lambda candidate: SequenceMatcher(None, requested, candidate.casefold()).ratio(),
        default=None,
    )


def _file_stem(name: str) -> str:
    """Returns the name without its endings: `a` for `a.jsonl` and for `a.jsonl.gz`."""
    path = Path(name)
    return Path(path.stem).stem if path.suffix == ".gz" else path.stem
