"""Collects the rows that cannot be used. These rows are either skipped, or an error message lists
them, grouped by reason.

A row is bad if it is not valid JSON or UTF-8, if it has wrong keys or types, or if the chat
template raises an error for it. A row with an empty answer is not bad. But it has no tokens to
learn, so it is always skipped and counted. Bad rows and rows with an empty answer are written to
bad_rows.jsonl in the run folder.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..wording import pluralise

BAD_ROWS_FILE = "bad_rows.jsonl"
MAX_LOCATIONS = 40  # largest number of rows that one error names
MAX_LISTED = 10_000  # largest number of bad rows of a source that are stored; all are counted
EMPTY_REASON = "the answer is empty"
SKIP_FIX = (
    "data.on_bad_row: skip leaves them out, counts them and lists them in the run's bad_rows.jsonl"
)

NO_USABLE_ROWS_FIX = (
    "none of the rows can be used as they are: docs/data.md shows each format; data.columns names"
    " keys that are called otherwise"
)


class BadRowsError(UsageError):
    """Raised for data with bad rows, if `data.on_bad_row: skip` would leave them out."""


class RowError(UsageError):
    """Raised for a row that cannot be used. Other rows of the file may be valid."""


class EmptyAnswer(RowError):
    """Raised for a row whose answer is empty or contains only white space."""

    reason = EMPTY_REASON


class NoLabel(EmptyAnswer):
    """Raised for a row that has no label. A label says whether the answer is wanted."""

    reason = "no label says whether the answer is wanted"


@dataclass(frozen=True, slots=True)
class BadRow:
    """Represents a row that a run does not use. `is_empty` is true if the reason is an empty answer
    or a missing label.
    """

    location: str
    reason: str
    fix: str | None = None
    is_empty: bool = False

    @classmethod
    def from_error(cls, error: UsageError, location: str) -> BadRow:
        """Returns the bad row for an error. Raises the error again if its message does not begin
        with the row's location.
        """
        if not error.message.startswith(f"{location}: "):
            raise error
        if isinstance(error, EmptyAnswer):
            return cls(location, error.reason, error.fix, is_empty=True)
        return cls(location, error.message.removeprefix(f"{location}: "), error.fix)


@dataclass
class BadRows:
    """Collects the bad rows of one or several sources.

    kinds        the number of bad rows for each reason; bad rows are an error unless
                 data.on_bad_row is skip
    empty_count  number of rows with an empty answer
    listed       the rows, at most MAX_LISTED
    """

    kinds: Counter[str] = field(default_factory=Counter)
    empty_count: int = 0
    listed: list[BadRow] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(self.kinds.values())

    def add(self, row: BadRow) -> None:
        if row.is_empty:
            self.empty_count += 1
        else:
            self.kinds[normalise_reason(row.reason)] += 1
        if len(self.listed) < MAX_LISTED:
            self.listed.append(row)

    def to_dict(self) -> dict[str, Any]:
        rows = [[row.location, row.reason, row.fix, row.is_empty] for row in self.listed]
        return {"kinds": dict(self.kinds), "empty": self.empty_count, "rows": rows}

    def update(self, counts: dict[str, Any]) -> None:
        """Adds the counts of another `BadRows` object. `counts` is what the method `to_dict` of
        that object returned.
        """
        self.kinds.update(counts["kinds"])
        self.empty_count += counts["empty"]
        self.listed += [BadRow(*row) for row in counts["rows"]]

    def refuse(self, *, usable_rows: int) -> None:
        """Raises UsageError if there are bad rows. The message lists the reasons, and at most
        MAX_LOCATIONS rows.

        usable_rows  number of rows that can be used; if it is 0, the message does not advise to
                     skip the bad rows
        """
        bad = [row for row in self.listed if not row.is_empty]
        fix = SKIP_FIX if usable_rows else NO_USABLE_ROWS_FIX
        if self.count == 1 and bad:
            raise _bad_rows_error(f"{bad[0].location}: {bad[0].reason}", fix=bad[0].fix or fix)
        if not self.count:
            return
        lines = [f"{self.count:,} rows cannot be used", *list_by_reason(bad, self.kinds)]
        raise _bad_rows_error("\n".join(lines), fix=fix)


def _bad_rows_error(message: str, *, fix: str) -> UsageError:
    return BadRowsError(message, fix=fix) if fix == SKIP_FIX else UsageError(message, fix=fix)


def list_by_reason(rows: list[BadRow], kinds: Counter[str]) -> list[str]:
    """Returns lines that list the reasons of bad rows, the most frequent first. Under each reason
    are the locations of some of its rows. At most MAX_LOCATIONS locations are listed in all.

    rows   some or all of the bad rows
    kinds  the number of bad rows for each reason in the form of `normalise_reason`
    """
    by_kind: dict[str, list[BadRow]] = {}
    for row in rows:
        by_kind.setdefault(normalise_reason(row.reason), []).append(row)
    listed_kinds = sorted(by_kind, key=lambda kind: -kinds[kind])[:MAX_LOCATIONS]
    free_locations = MAX_LOCATIONS - len(listed_kinds)
    lines = []
    for kind in listed_kinds:
        # the full reason of one row, so that the user can copy a command in it
        reason = by_kind[kind][0].reason
        listed = by_kind[kind][: 1 + free_locations]
        free_locations -= len(listed) - 1
        locations = ", ".join(row.location for row in listed)
        more = kinds[kind] - len(listed)
        if more:
            locations += f", and {more:,} more"
        lines.append(f"  {kinds[kind]:,} x {reason}\n      {locations}")
    if len(kinds) > len(listed_kinds):
        lines.append(f"  and {pluralise(len(kinds) - len(listed_kinds), 'more kind')}")
    return lines


def normalise_reason(reason: str) -> str:
    """Returns a reason without the details of a row, so that rows with the same reason can be
    counted. The function replaces numbers and quoted texts by placeholders. A quoted text that is a
    single word, such as the name of a role, stays in the reason. Digits within a name (UTF-8,
    cp1252.csv) stay too.
    """

    def replace_quoted(match: re.Match[str]) -> str:
        is_word = re.fullmatch(r"'[\w.-]{1,40}'", match[0]) is not None
        return match[0] if is_word else "'...'"

    reason = re.sub(r"'[^']*'|\"[^\"]*\"", replace_quoted, reason)
    return re.sub(r"0x[0-9a-f]+|(?<![\w.-])\d[\d,]*(?![\w.-]\w)", "N", reason)


class BadRowFile:
    """Writes the file bad_rows.jsonl of a run. Each line is a JSON object with the keys `place` and
    `reason`. The place is the file and the line of a row, and each place is listed once. The file
    is created when the first bad row is found.
    """

    def __init__(self, path: Path, *, resuming: bool = False) -> None:
        self.path = path
        self._written: set[str] = set()
        if not resuming:
            path.unlink(missing_ok=True)
        elif path.is_file():
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    self._written.add(str(json.loads(line)["place"]))
                except (ValueError, LookupError, TypeError):
                    continue

    @property
    def count(self) -> int:
        return len(self._written)

    def write(self, rows: Iterable[BadRow]) -> None:
        new = {row.location: row for row in rows if row.location not in self._written}
        if not new:
            return
        self._written.update(new)
        with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            for row in new.values():
                file.write(
                    json.dumps({"place": row.location, "reason": row.reason}, ensure_ascii=False)
                    + "\n"
                )
