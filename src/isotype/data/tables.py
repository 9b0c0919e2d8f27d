"""Reads the rows of tables as objects by column: CSV and TSV line by line, Parquet in batches of rows.

Parquet fills missing keys with nulls at every depth. They are removed, so that a message without `tool_calls` has no such key.
"""

from __future__ import annotations

import csv
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .progress import Meter
from .read import NoRows, Record, column_name, decoded_line, ending, raw_lines

_BATCH = 512  # rows of Parquet widened to Python at once
_SEP_LINE = re.compile(r'"?sep=(.)"?\r?\n?')  # Excel's own line above the header, which names the delimiter
_NULL = r"\N"  # what MySQL, Hive and PostgreSQL write for no value
_FIELD = 1 << 27  # characters of one CSV cell; csv's own limit, 131072, is less than a long document


_QUOTES = '; CSV doubles the quotes inside a cell, and this file may have \\" in their place'


def read_csv(path: Path, name: str, *, skip: int = 0, meter: Meter | None = None) -> Iterator[Record]:
    """Rows of a CSV or TSV file with a header. A row with more or fewer cells than the header is a record that says so."""
    at = 0
    wrong: str | None = None  # of the bytes of the row being read

    def lines() -> Iterator[str]:
        nonlocal at, wrong
        for number, offset, raw in raw_lines(path, name, meter):
            line, bad = decoded_line(raw, file=name, line=number, offset=offset)
            at = number
            if bad and number == 1:
                raise UsageError(f"{name}:1: {bad}")
            wrong = wrong or bad
            yield line

    csv.field_size_limit(_FIELD)
    source = lines()
    first = next(source, "")
    begins = 1
    if told := _SEP_LINE.fullmatch(first):
        first = next(source, "")
        begins = 2
    delimiter = told[1] if told else "\t" if ending(path) == ".tsv" else _delimiter(first)
    rows = csv.reader(chain([first] if first else [], source), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        cells: list[str] = []
        try:
            cells = next(rows)
        except StopIteration:
            break
        except csv.Error as error:  # the reader goes on with the next line
            if header is None and "new-line character" in str(error):
                raise UsageError(f"{name}:{begins}: the line ends are a lone carriage return", fix=_with_line_ends(name)) from None
            if header is None:
                raise UsageError(f"{name}:{begins}: broken CSV: {error}") from None
            if at > begins or "unexpected end of data" in str(error):  # its cell ran on into the rows below
                raise UsageError(f"{name}:{begins}: a quote opens a cell and is not closed, or not doubled inside it") from None
            wrong = wrong or f"broken CSV: {error}{_QUOTES if ' expected after ' in str(error) else ''}"
        if header is None and cells:
            header = _header([column_name(cell) for cell in cells], name)
        elif header is not None and (any(cell.strip() for cell in cells) or wrong):  # else a blank line, or `;;` as spreadsheets write it
            wrong = wrong or _wrong_cells(cells, header)
            if skip:
                skip -= 1
            else:
                # spreadsheets end rows in empty columns
                row = {column: None if cell == _NULL else cell for column, cell in zip(header, cells) if column or cell}
                yield Record(name, begins, None if wrong else row, wrong=wrong)
        begins, wrong = at + 1, None
    if header is None:
        raise NoRows(f"{name}: the file holds no header")


def _wrong_cells(cells: list[str], header: list[str]) -> str | None:
    """What is wrong with the cells of a row, by the header."""
    if len(header) > 1 and [column_name(cell) for cell in cells] == header:
        return "the header again: give files that were joined as a list, data.train: [a.csv, b.csv]"
    if len(cells) == len(header):
        return None
    if header[0].startswith("#"):
        hint = f"; the first line was taken for the header: {header[0][:40]!r}: remove it if it is a comment"
    elif len(cells) < len(header):
        hint = ""
    elif any(cell.startswith(' "') for cell in cells):
        hint = "; a quote counts where no space is before it"
    else:
        hint = "; quote a cell that holds the delimiter"
    return f"{len(cells)} cells, {'more' if len(cells) > len(header) else 'fewer'} than the header's {len(header)}{hint}"


def read_parquet(path: Path, name: str, *, skip: int = 0, meter: Meter | None = None) -> Iterator[Record]:
    """Rows of a Parquet file, numbered from 1."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    size = path.stat().st_size
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            if doubled := _doubled(file.schema_arrow.names):  # a row would hold the last one's value
                raise UsageError(f"{name}: the column {doubled!r} is there twice")
            rows = max(1, file.metadata.num_rows)
            before = 0
            for group in range(file.metadata.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                if number + count <= skip:
                    number += count
                    continue
                for batch in file.iter_batches(_BATCH, row_groups=[group]):
                    for value in _objects(batch):
                        number += 1
                        if number > skip:
                            yield Record(name, number, without_nulls_inside(value), "row")
                    if meter is not None:
                        meter.done += size * number // rows - before
                        before = size * number // rows
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{name}, row {number + 1}: broken Parquet: {str(error).splitlines()[0]}") from None


def _objects(batch: Any) -> list[dict[str, Any]]:
    """The rows of a batch. A date that Python cannot hold, or of an unknown time zone, is None: most such columns are never read."""
    columns = [_values(column) for column in batch.columns]
    return [dict(zip(batch.schema.names, row)) for row in zip(*columns)]


def _values(column: Any) -> list[Any]:
    def value(scalar: Any) -> Any:
        try:
            return scalar.as_py()
        except (OverflowError, ValueError):
            return None

    try:
        found: list[Any] = column.to_pylist()
    except (OverflowError, ValueError):
        found = [value(scalar) for scalar in column]
    return found


def without_nulls_inside(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose values have no key that holds null, at any depth; a column that is null itself stays, for its error's sake."""
    return {key: _without_nulls(value) for key, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _delimiter(header: str) -> str:
    """A comma, or what a header without one is divided by: semicolons in many spreadsheets, tabs, vertical bars."""
    return next((mark for mark in ",;\t|" if mark in header), ",")


def _with_line_ends(name: str) -> str:
    return f"tr '\\r' '\\n' < {shlex.quote(name)} > lines{Path(name).suffix}"


def _header(names: list[str], file: str) -> list[str]:
    if doubled := _doubled([name for name in names if name]):
        raise UsageError(f"{file}:1: the column {doubled!r} is named twice")
    return names


def _doubled(names: Sequence[str]) -> str | None:
    return next((name for name, n in Counter(names).items() if n > 1), None)
