"""`counted`: a number with the word that it counts. Imports no torch."""

from __future__ import annotations


def counted(number: int, one: str, many: str | None = None) -> str:
    """`1 row`, `1,234 rows`; `many` where the plural is not `one` with an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
