"""Reads the rows of tables as objects by column: CSV and TSV line by line, Parquet in batches of rows.

Parquet fills missing keys with nulls at every depth. They are removed, so that a message without `tool_calls` has no such key.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .read import NoRows, Record, column_name, decoded_line, ending, raw_lines

_BATCH = 512  # rows of Parquet widened to Python at once
_FIELD = 1 << 27  # characters of one CSV cell; csv's own limit, 131072, is less than a long document


def read_csv(path: Path, name: str, *, skip: int = 0) -> Iterator[Record]:
    """Rows of a CSV or TSV file with a header. A row with more or fewer cells than the header is a record that says so."""
    at = 0
    wrong: str | None = None  # of the bytes of the row being read

    def lines() -> Iterator[str]:
        nonlocal at, wrong
        for number, offset, raw in raw_lines(path, name):
            line, bad = decoded_line(raw, file=name, line=number, offset=offset)
            at = number
            if bad and number == 1:
                raise UsageError(f"{name}:1: {bad}")
            wrong = wrong or bad
            yield line

    csv.field_size_limit(_FIELD)
    source = lines()
    first = next(source, "")
    delimiter = "\t" if ending(path) == ".tsv" else _delimiter(first)
    rows = csv.reader(chain([first] if first else [], source), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    begins = 1
    while True:
        cells: list[str] = []
        try:
            cells = next(rows)
        except StopIteration:
            break
        except csv.Error as error:  # the reader goes on with the next line
            if header is None:
                raise UsageError(f"{name}:{begins}: broken CSV: {error}") from None
            if at > begins or "unexpected end of data" in str(error):  # its cell ran on into the rows below
                raise UsageError(f"{name}:{begins}: a quote opens a cell and is not closed, or not doubled inside it") from None
            wrong = wrong or f"broken CSV: {error}"
        if header is None and cells:
            header = _header([column_name(cell) for cell in cells], name)
        elif header is not None and (any(cell.strip() for cell in cells) or wrong):  # else a blank line, or `;;` as spreadsheets write it
            wrong = wrong or _wrong_cells(cells, header)
            if skip:
                skip -= 1
            else:
                # spreadsheets end rows in empty columns
                row = {column: cell for column, cell in zip(header, cells) if column or cell}
                yield Record(name, begins, None if wrong else row, wrong=wrong)
        begins, wrong = at + 1, None
    if header is None:
        raise NoRows(f"{name}: the file holds no header")


def _wrong_cells(cells: list[str], header: list[str]) -> str | None:
    """What is wrong with the cells of a row, by the header."""
    if len(cells) == len(header):
        return None
    more = len(cells) > len(header)
    hint = "; quote a cell that holds the delimiter" if more else ""
    return f"{len(cells)} cells, {'more' if more else 'fewer'} than the header's {len(header)}{hint}"


def read_parquet(path: Path, name: str, *, skip: int = 0) -> Iterator[Record]:
    """Rows of a Parquet file, numbered from 1."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            if doubled := _doubled(file.schema_arrow.names):  # a row would hold the last one's value
                raise UsageError(f"{name}: the column {doubled!r} is there twice")
            for group in range(file.metadata.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                if number + count <= skip:
                    number += count
                    continue
                for batch in file.iter_batches(_BATCH, row_groups=[group]):
                    for value in batch.to_pylist():
                        number += 1
                        if number > skip:
                            yield Record(name, number, without_nulls_inside(value), "row")
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # the last of a date that Python cannot hold
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{name}, row {number + 1}: broken Parquet: {str(error).splitlines()[0]}") from None


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


def _header(names: list[str], file: str) -> list[str]:
    if doubled := _doubled([name for name in names if name]):
        raise UsageError(f"{file}:1: the column {doubled!r} is named twice")
    return names


def _doubled(names: Sequence[str]) -> str | None:
    return next((name for name, n in Counter(names).items() if n > 1), None)
