"""`Source`: one entry of data.train or data.eval; its kinds are in `sources` and `hub`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ..config.sources import SourceSpec
from .bad_rows import BadRow, RowError
from .formats import Example, FormatName, detect, example, ignored_keys
from .read import NoRows, Record

NO_ROWS = "the file holds no rows"
_LOOKED_AT = 64  # rows from whose first sound one the format is taken


@dataclass
class Source:
    """One entry of data.train or data.eval, found and looked at, not yet read.

    only      the one format of which the objective learns
    forms     format and reason of each part, in order
    ignored   keys that nothing reads, counted while reading
    """

    spec: SourceSpec
    needs_answer: bool
    only: FormatName | None = None
    forms: list[tuple[FormatName, str]] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def formats(self) -> set[FormatName]:
        return {form for form, _ in self.forms}

    @property
    def bytes(self) -> int:
        """Of the files; 0 where that is not known."""
        return 0

    @property
    def about_rows(self) -> int:
        """For the time left while they are read; 0 where nothing is known."""
        return self.spec.limit or 0

    def identity(self) -> dict[str, Any]:
        """Identifies the content, for the cache's key and for data.json: its `sha256`, or another name."""
        raise NotImplementedError

    def examples(self, *, skip: int = 0) -> Iterator[Example | BadRow]:
        """The checked rows, at most `limit` of them, those that cannot be used among them. `skip`: so many are passed over."""
        raise NotImplementedError

    def texts(self) -> Iterator[tuple[str, Iterator[str]]]:
        """Plain text files, each a name with its pieces."""
        return iter(())

    def facts(self) -> dict[str, Any]:
        """The entry of a source in data.json before it is read."""
        forms = sorted(self.formats)
        return {
            "path": self.name,
            **({"weight": self.spec.weight} if self.spec.weight is not None else {}),
            **self.identity(),
            "format": forms[0] if len(forms) == 1 else ", ".join(forms),
            "why": self.forms[0][1],
        }

    def checked(self, records: Iterator[Record], form: FormatName) -> Iterator[Example | BadRow]:
        columns = self.spec.columns
        for record in records:
            try:
                found = example(record, form, needs_answer=self.needs_answer, columns=columns)
            except RowError as error:
                yield BadRow.of(error, record.place)
                continue
            self.ignored.update(ignored_keys(record.value, form, columns))
            yield found

    def looked_at(self, records: Iterator[Record], name: str) -> None:
        """Takes the format of the first row that has one. Raises UsageError where none of the first rows has."""
        first_error: RowError | None = None
        for record in islice(records, _LOOKED_AT):
            try:
                asked: Any = self.spec.format  # config.sources checked it
                self.forms.append(detect(record, asked, self.spec.columns, only=self.only))
            except RowError as error:  # another row may be valid; if none is, the error of the first row is raised
                first_error = first_error or error
                continue
            return
        raise first_error or NoRows(f"{name}: {NO_ROWS}")
