"""Finds JSON that is a data frame and no row: what pandas' `to_json` and `to_dict` write by default, and with other values of `orient`.

Such a file is one value that holds the whole table, by column, by index or in parts. It is not read; the error names the form and the call
that writes rows.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..errors import UsageError
from ..wording import counted
from .read import Record

_ROWS = 'orient="records", lines=True'
_SHOWN = 6  # columns that the message names


def refuse_data_frame(record: Record, keys: Collection[str]) -> None:
    """Raises UsageError where a file's first value is a whole table.

    keys  those that rows of the known formats have, as the file calls them: under them a text or a list is wanted
    """
    value = record.value
    if not isinstance(value, dict) or not value:
        return
    if value.keys() == {"columns", "index", "data"} and isinstance(value["columns"], list) and isinstance(value["data"], list):
        raise _error(record, value["columns"], len(value["data"]), "its columns, index and data apart", "split")
    fields = value["schema"].get("fields") if value.keys() == {"schema", "data"} and isinstance(value["schema"], dict) else None
    if isinstance(fields, list) and isinstance(value["data"], list):
        names = [field.get("name") for field in fields if isinstance(field, dict)]
        raise _error(record, names, len(value["data"]), "a schema and its data", "table")
    inner = list(value.values())
    if all(isinstance(one, dict) and one and one.keys() == inner[0].keys() for one in inner):
        if _is_index(inner[0]) or (not _is_index(value) and any(key in value for key in keys)):
            raise _error(record, list(value), len(inner[0]), "an object for each column", "columns")
        if _is_index(value):
            raise _error(record, list(inner[0]), len(inner), "an object for each row, under its number", "index")
    if len(inner) > 1 and any(key in value for key in keys) and all(_is_column(one) and len(one) == len(inner[0]) for one in inner):
        raise _error(record, list(value), len(inner[0]), "a list for each column", None)


def _is_index(row: dict[str, Any]) -> bool:
    return all(key.isdecimal() for key in row)


def _is_column(value: Any) -> bool:
    """A list of a table's cells, and not the turns of a conversation."""
    return isinstance(value, list) and len(value) > 1 and not any(isinstance(cell, dict | list) for cell in value)


def _error(record: Record, columns: list[Any], rows: int, form: str, orient: str | None) -> UsageError:
    named = ", ".join(map(str, columns[:_SHOWN])) + (", ..." if len(columns) > _SHOWN else "")
    said = f"{record.place}: one table of {counted(rows, 'row')}, written as {form} ({named}), and each row must be an object"
    if orient is None:
        made = f'pandas.DataFrame(json.load(open("{record.file}")))'
    else:
        form = "" if orient == "columns" else f', orient="{orient}"'
        # else pandas would make numbers of texts that look like them; a schema says what they are
        as_they_are = "" if orient == "table" else ", dtype=False"
        made = f'pandas.read_json("{record.file}"{form}{as_they_are})'
    return UsageError(said, fix=f'{made}.to_json("rows.jsonl", {_ROWS})')
