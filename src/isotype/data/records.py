"""Reads the rows of a file as records. The formats are JSON lines, JSON arrays, CSV, TSV and
Parquet.

The lines of JSON, CSV and TSV files are read one at a time. For a JSON array, the whole text is in
memory, but its values are parsed one at a time. So much less memory is needed than with
`json.loads`. An object with a repeated key is an error. Python's `json` would keep the last value
without a warning. Parquet is read in batches. A Parquet file stores null for missing keys at every
depth of a value. These nulls are removed, so that a message without `tool_calls` does not have this
key.
"""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..wording import format_binary_bytes
from .read import (
    JSON_ENDINGS,
    NoRows,
    Record,
    column_name,
    decode_line,
    file_suffix,
    first_line,
    raw_lines,
    text_lines,
)

MAX_ARRAY_BYTES = 4 << 30  # largest size of a file that holds one JSON array
MAX_COMPRESSED_ARRAY_BYTES = 1 << 28  # largest unpacked size of a gzipped JSON array
# Parquet: how much a column of a row group may unpack to, in bytes, unless it is less than so many
# times its size in the file; a file of 2 kB can unpack to many GB
MAX_COLUMN_BYTES = 1 << 30
MAX_COLUMN_RATIO = 20
_LIST_ELEMENT_BYTES = 8  # a null in a list takes no space in the file, and this in memory
_BATCH_BYTES = 1 << 28  # memory of the rows that are read at once
_BATCH_ROWS = 512  # number of rows of Parquet that are converted to Python objects at once
# characters of one CSV cell; csv's own limit, 131072, is less than a long document
_MAX_CELL_CHARACTERS = 1 << 27
_BLANK = re.compile(r"[ \t\n\r]*")
# Excel's first line that names the delimiter of the others
_SEPARATOR_LINE = re.compile(r"""^"?sep=([^\w\s"']|\t)"?\s*$""", re.IGNORECASE)
_SURROGATE = re.compile("[\ud800-\udfff]")
_SEVERAL_LINES_HINT = "; an array, or objects over several lines, are read from a file named .json"


def read_records(path: Path, name: str, *, skip: int = 0) -> Iterator[Record]:
    """Yields the rows of a file in order, except for the first `skip` rows. The file's ending
    decides the format. A row that cannot be parsed is yielded with an `error`.

    Raises  UsageError with file and line where the rest of the file cannot be read
    """
    suffix = file_suffix(path)
    if suffix in JSON_ENDINGS:
        return read_json(path, name, skip=skip)
    if suffix == ".parquet":
        return read_parquet(path, name, skip=skip)
    return read_csv(path, name, skip=skip)


def read_json(path: Path, name: str, *, skip: int = 0) -> Iterator[Record]:
    """Reads a JSON file. The file may contain one object per line, an array of objects, or objects
    that extend over several lines. The first `skip` lines are not parsed.
    """
    first = first_line(path) if file_suffix(path) == ".json" else ""
    # a first line that is only `{` begins an object over several lines
    if first[:1] != "[" and first != "{":
        yield from _read_lines(path, name, skip)
        return
    previous_line = 0  # the line of the previous row
    for i, record in enumerate(_read_values(path, name, in_array=first != "{")):
        if i >= skip:
            yield replace(record, row=i + 1) if record.line == previous_line else record
        previous_line = record.line


def _read_lines(path: Path, name: str, skip: int) -> Iterator[Record]:
    decoder = ObjectDecoder()
    is_json_file = file_suffix(path) == ".json"
    for number, offset, raw in raw_lines(path, name):
        line, decoding_problem = decode_line(raw, file=name, offset=offset)
        if not line.strip():
            continue
        if skip:
            skip -= 1
            continue
        value = None
        message = ": ".join(decoding_problem or ())
        try:
            value = None if message else decoder.decode(line)
        except json.JSONDecodeError as error:
            hint = _json_hint(line, error.pos)
            if is_json_file and hint in ("", _SEVERAL_LINES_HINT):
                hint = "; a .json file holds an array, or one object a line"
            is_cut_short = error.pos >= len(line.rstrip())
            if is_cut_short:
                position = ": the line ends within a value"
            else:
                position = f" at column {error.pos + 1}: {error.msg}"
            message = f"broken JSON{position}{hint}"
        except (RecursionError, ValueError) as error:
            message = _python_limit_message(error)
        if isinstance(value, list):
            message = "a row must be an object with keys, got a list"
            if not is_json_file:
                message += "; a file that is one array is named .json"
        if message:
            yield Record(name, number, None, error=message)
        else:
            yield _check_value(name, number, value, line, decoder.repeated_key)


def _json_hint(line: str, position: int) -> str:
    """Returns a hint for a line that is not a JSON object. Returns "" if the mistake is not a
    common one. `position` is the position of the error in the line.
    """
    text = line.strip()
    rest = line[position:].strip()
    if text in ("{", "[", "]", "}"):
        return _SEVERAL_LINES_HINT
    if rest == ",":
        return "; a row has no comma behind it where each line is a row"
    if text.startswith("{'"):
        return "; Python's own notation is no JSON: json.dumps writes it"
    if rest.startswith("{"):
        return "; each line holds one object"
    return ""


def _read_values(path: Path, name: str, *, in_array: bool) -> Iterator[Record]:
    """Yields the values of a JSON array, or the objects of a file that contains one object after
    the other. A value may extend over several lines.
    """
    if (size := path.stat().st_size) > MAX_ARRAY_BYTES:
        fix = f"one object a line: jq -c '.[]' {shlex.quote(name)} > rows.jsonl"
        raise UsageError(
            f"{name}: {size >> 30} GiB of JSON that is not one object a line, and it is read as a"
            " whole",
            fix=fix,
        )
    text = _read_array_text(path, name)
    decoder = ObjectDecoder()

    def skip_blanks(position: int) -> int:
        return _BLANK.match(text, position).end()  # type: ignore[union-attr]  # it matches nothing too

    def syntax_error(position: int, message: str, fix: str | None = None) -> UsageError:
        line = text.count("\n", 0, position) + 1
        return UsageError(f"{name}:{line}: {message}", fix=fix)

    position = skip_blanks(0)
    if in_array:
        position = skip_blanks(position + 1)
        if text[position : position + 1] == "]":
            return
    # the line number of the character at `counted_to`
    line = 1
    counted_to = 0
    while in_array or position < len(text):
        line = line + text.count("\n", counted_to, position)
        counted_to = position
        try:
            value, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise syntax_error(
                error.pos, f"broken JSON at column {error.colno}: {error.msg}"
            ) from None
        except (RecursionError, ValueError) as error:
            raise syntax_error(position, _python_limit_message(error)) from None
        yield _check_value(name, line, value, text[position:end], decoder.repeated_key)
        position = skip_blanks(end)
        if in_array:
            separator = text[position : position + 1]
            following = skip_blanks(position + 1)
            if separator == "]":
                if following < len(text):
                    raise syntax_error(
                        following,
                        "text after the end of the array",
                        fix="one file holds one array: give the rest its own file",
                    )
                return
            if separator != ",":
                raise syntax_error(
                    position,
                    "broken JSON: ',' or ']' expected"
                    + ("" if separator else ", the file ends here"),
                )
            position = following


def _read_array_text(path: Path, name: str) -> str:
    """Reads a file that contains one JSON array, or objects that extend over several lines. Raises
    UsageError if the file is gzipped and its content is larger than `MAX_COMPRESSED_ARRAY_BYTES`.
    """
    if path.suffix.lower() != ".gz":
        return "".join(line for _, line in text_lines(path, name, max_line_bytes=MAX_ARRAY_BYTES))
    limit = MAX_COMPRESSED_ARRAY_BYTES
    lines = []
    size = 0
    for _, line in text_lines(path, name, max_line_bytes=limit):
        lines.append(line)
        size += len(line)
        if size > limit:
            raise UsageError(
                f"{name}: it unpacks to more than {format_binary_bytes(limit)} of JSON that is not"
                " one object a line",
                fix=f"gzip -dc {shlex.quote(name)} | jq -c '.[]' > rows.jsonl",
            )
    return "".join(lines)


def _python_limit_message(error: Exception) -> str:
    """Returns the error message for valid JSON that Python cannot read, because it is nested too
    deeply or contains an integer with more than 4300 digits.
    """
    if isinstance(error, RecursionError):
        return "JSON nested too deeply"
    return f"broken JSON: {str(error).partition(';')[0]}"


def _check_value(name: str, line: int, value: Any, source: str, repeated_key: str | None) -> Record:
    """Returns a `Record` that contains the row `value`. The record has an error if one of the row's
    objects has the key `repeated_key` twice. It also has an error if a text contains half of a
    surrogate pair. Such a text is valid JSON, but tokenizers raise an error for it.
    """
    message = None if repeated_key is None else str(RepeatedKey(repeated_key))
    if (
        not message
        and "\\u" in source.lower()
        and _SURROGATE.search(json.dumps(value, ensure_ascii=False))
    ):
        message = "a \\u escape is half of a surrogate pair, which is not text"
    return Record(name, line, None if message else value, error=message)


def read_csv(path: Path, name: str, *, skip: int = 0) -> Iterator[Record]:
    """Yields the rows of a CSV or TSV file with a header. If a row has more or fewer cells than the
    header, its record has an error.
    """
    table = _Table(path, name)
    for line, cells, error in table.rows():
        # a blank line, or `;;` as spreadsheets write it
        if not error and not any(cell.strip() for cell in cells):
            continue
        if skip:
            skip -= 1
            continue
        error = error or _cell_count_error(cells, table.header)
        if error:
            yield Record(name, line, None, error=error)
        else:
            # spreadsheets write empty columns at the end of rows
            columns = zip(table.header, cells, strict=True)
            row = {column: cell for column, cell in columns if column or cell}
            yield Record(name, line, row)
    if not table.header:
        raise NoRows(f"{name}: the file holds no header")


class _Table:
    """A CSV or TSV file. `header` contains the names of the columns. `header` is empty until the
    first row is read.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.header: list[str] = []
        self._row_error: str | None = None  # the first error in the lines of the current row

    def rows(self) -> Iterator[tuple[int, list[str], str | None]]:
        """Yields a tuple (line, cells, error or None) for each row below the header.

        Raises  UsageError where the rest of the file cannot be read
        """
        csv.field_size_limit(_MAX_CELL_CHARACTERS)
        lines = self._lines()
        first = next(lines, "")
        line = 1
        if match := _SEPARATOR_LINE.match(first):
            delimiter = match[1]
            first = next(lines, "")
            line = 2
        else:
            delimiter = _find_delimiter(self.path, first)
        rows = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
        lines_before = line - 1
        while True:
            cells: list[str] = []
            try:
                cells = next(rows)
            except StopIteration:
                return
            except csv.Error as error:  # the reader continues with the next line
                last_line = lines_before + rows.line_num
                self._refuse_header_or_open_quote(error, line, last_line)
                self._row_error = self._row_error or f"broken CSV: {error}"
            if self.header:
                yield line, cells, self._row_error
            elif cells:
                self.header = _check_header(cells, self.name)
            line = lines_before + rows.line_num + 1
            self._row_error = None

    def _refuse_header_or_open_quote(self, error: csv.Error, line: int, last_line: int) -> None:
        """Raises UsageError if the header is broken, or if a quoted cell has no closing quote and
        so extends over the following rows.
        """
        if not self.header:
            raise UsageError(f"{self.name}:{line}: broken CSV: {error}") from None
        if last_line > line or "unexpected end of data" in str(error):
            raise UsageError(
                f"{self.name}:{line}: a quote opens a cell and is not closed, or not doubled"
                " inside it"
            ) from None

    def _lines(self) -> Iterator[str]:
        for number, offset, raw in raw_lines(self.path, self.name):
            line, problem = decode_line(raw, file=self.name, offset=offset)
            if problem and number == 1:
                raise UsageError(f"{self.name}:1: {problem[0]}", fix=problem[1])
            if problem and not self._row_error:
                self._row_error = ": ".join(problem)
            yield line


def _find_delimiter(path: Path, header: str) -> str:
    """Returns the character that separates the columns in a header. If the header contains a comma,
    this is the delimiter. Otherwise the delimiter is a semicolon, a tab or a vertical bar. Many
    spreadsheet programs write semicolons.
    """
    if file_suffix(path) == ".tsv":
        return "\t"
    return next((mark for mark in ",;\t|" if mark in header), ",")


def _check_header(cells: Sequence[str], name: str) -> list[str]:
    """Returns the names of the columns. Raises UsageError if two columns have the same name."""
    header = [column_name(cell) for cell in cells]
    if duplicate := _find_duplicate([column for column in header if column]):
        raise UsageError(f"{name}:1: the column {duplicate!r} is named twice")
    return header


def _cell_count_error(cells: Sequence[str], header: Sequence[str]) -> str | None:
    if len(cells) > len(header):
        return (
            f"{len(cells)} cells, more than the header's {len(header)}; quote a cell that holds the"
            " delimiter"
        )
    if len(cells) < len(header):
        return f"{len(cells)} cells, fewer than the header's {len(header)}"
    return None


def read_parquet(path: Path, name: str, *, skip: int = 0) -> Iterator[Record]:
    """Yields the rows of a Parquet file, numbered from 1."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            # a row would only contain the last column's value
            if doubled := _find_duplicate(file.schema_arrow.names):
                raise UsageError(f"{name}: the column {doubled!r} is there twice")
            for group in range(file.metadata.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                if number + count <= skip:
                    number += count
                    continue
                largest_column = _refuse_large_columns(file, group, name)
                # each row may repeat the largest entry of a column's dictionary
                batch_rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, largest_column)))
                for batch in file.iter_batches(batch_rows, row_groups=[group]):
                    for value in batch.to_pylist():
                        number += 1
                        if number > skip:
                            yield Record(name, number, remove_inner_nulls(value), "row")
    except UsageError:
        raise
    # OverflowError: a date that Python cannot represent
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise UsageError(
            f"{name}, row {number + 1}: broken Parquet: {str(error).splitlines()[0]}"
        ) from None


def _refuse_large_columns(file: Any, group: int, name: str) -> int:
    """Raises UsageError if the file's metadata show that a column would have too many bytes when it
    is unpacked. Returns the size of the largest unpacked column of the row group, in bytes.
    """
    largest = 0
    columns = file.metadata.row_group(group)
    for index in range(columns.num_columns):
        column = columns.column(index)
        size = column.total_uncompressed_size
        largest = max(largest, size)
        if file.schema.column(index).max_repetition_level:
            size = max(size, column.num_values * _LIST_ELEMENT_BYTES)
        limit = max(MAX_COLUMN_BYTES, MAX_COLUMN_RATIO * column.total_compressed_size)
        if size > limit:
            raise UsageError(
                f"{name}: the column {column.path_in_schema!r} of row group {group + 1} unpacks to"
                f" {format_binary_bytes(size)}, more than {format_binary_bytes(limit)}",
                fix="write it with smaller row groups (row_group_size), if you trust the file",
            )
    return int(largest)


def remove_inner_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Removes keys whose value is null from the values of a row, at any depth. A column of the row
    itself is kept even if its value is null, so that error messages can name the column.
    """
    return {key: _remove_nulls(value) for key, value in row.items()}


def _remove_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _remove_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_remove_nulls(inner) for inner in value]
    return value


def _find_duplicate(names: Sequence[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)


class RepeatedKey(ValueError):
    """Raised for a JSON object that contains the same key twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key[:60]!r} is given twice in one object")


class ObjectDecoder(json.JSONDecoder):
    """Decodes JSON in the same way as Python's `json`. If an object within the value has a key
    twice, `repeated_key` is set to the first such key, otherwise to None.

    A repeated key does not raise an error during decoding. Code that reads several values one after
    the other therefore still knows where the next value begins.
    """

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=self._object)
        self.repeated_key: str | None = None

    def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
        self.repeated_key = None
        return super().raw_decode(s, idx)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs) and self.repeated_key is None:
            visited: set[str] = set()
            self.repeated_key = next(key for key, _ in pairs if key in visited or visited.add(key))  # type: ignore[func-returns-value]  # add gives None
        return result


def parse_json(text: str) -> Any:
    """Parses a JSON text. Raises RepeatedKey, and the errors of `json.loads`."""
    decoder = ObjectDecoder()
    value = decoder.decode(text)
    if decoder.repeated_key is not None:
        raise RepeatedKey(decoder.repeated_key)
    return value
