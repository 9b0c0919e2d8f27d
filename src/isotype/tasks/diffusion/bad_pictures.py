"""Pictures that cannot be used, over all of the data: named together in one error, or left out and listed up to a bound."""

from __future__ import annotations

from collections.abc import Iterable

from ...data.bad_rows import FILE, PLACES, BadRow
from ...errors import UsageError

MOST_SKIPPED = 0.05  # of the pictures; more means that the data as a whole is wrong


class BadPictures:
    """The bad ones of a run, each place once, in the order in which they were found.

    skip  `images.on_bad_row: skip`
    """

    def __init__(self, *, skip: bool) -> None:
        self.skip = skip
        self.rows: dict[str, BadRow] = {}

    def add(self, rows: Iterable[BadRow]) -> None:
        for row in rows:
            self.rows.setdefault(row.place, row)

    def settle(self, good: int, *, fix: str | None = None) -> None:
        """Raises UsageError naming them, unless they may be left out.

        good  number of pictures that can be used
        fix   the fix of the error; that `skip` would leave them out is added where it would
        """
        if not self.rows:
            return
        share = len(self.rows) / (len(self.rows) + good)
        if self.skip and share <= MOST_SKIPPED:
            return
        rows = list(self.rows.values())
        lines = [f"{row.place}: {row.reason}" for row in rows[:PLACES]]
        if len(rows) > PLACES:
            lines.append(f"and {len(rows) - PLACES:,} more")
        if self.skip:
            lines.insert(0, f"images.on_bad_row: skip leaves out at most {MOST_SKIPPED:.0%} of the pictures, and these are {share:.0%}")
        offered = [fix] if fix else []
        if not self.skip and share <= MOST_SKIPPED:
            offered.append(f"images.on_bad_row: skip leaves them out and lists them in the run's {FILE}")
        raise UsageError("\n".join(lines), fix="; or ".join(offered) or "mend or remove these")
