"""Rows in memory as a source: a list of rows, a `datasets.Dataset`, a pandas or polars frame become a file named by its content.

The file lies in the cache's folder, so that the run can be resumed, and what reads it is what reads any file.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .cache_folder import cache_folder
from .pictures import as_json


def as_source(given: Any) -> Any:
    """The name of the rows' file where `given` holds rows; else `given` itself: names, and mappings that name sources.

    Raises  UsageError for rows that are no JSON, and where no file can be written
    """
    rows = _rows(given)
    if rows is None:
        return given
    if not rows:
        raise UsageError("data: there is no row in it")
    try:
        text = "".join(json.dumps(row, ensure_ascii=False, default=_plain) + "\n" for row in rows).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError) as error:
        raise UsageError(f"data: a row cannot be written as JSON: {error}") from None
    tokens = cache_folder("auto")
    folder = (Path(tempfile.gettempdir()) / "isotype" if tokens is None else tokens.parent) / "rows"
    file = folder / f"{hashlib.sha256(text).hexdigest()[:32]}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "wb") as written:
            written.write(text)
        Path(aside).replace(file)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written: {error.strerror}", fix="write the rows to a file, and give its name") from None
    return str(file)


def as_sources(given: Any) -> Any:
    """`as_source` of each value where `given` is a mapping of evaluation sets, else of `given`."""
    if isinstance(given, Mapping) and "name" not in given:
        return {name: as_source(value) for name, value in given.items()}
    return as_source(given)


def _rows(given: Any) -> list[Any] | None:
    """The rows as mappings; None for what is no collection of rows."""
    if isinstance(given, list):
        are_rows = all(isinstance(row, Mapping) and "name" not in row for row in given)
        return given if are_rows else None
    if hasattr(given, "to_dicts"):  # polars
        return list(given.to_dicts())
    if hasattr(given, "to_list") and hasattr(given, "column_names"):  # datasets
        return list(given.to_list())
    if hasattr(given, "to_dict") and hasattr(given, "columns"):  # pandas
        return [{key: None if _is_missing(value) else value for key, value in row.items()} for row in given.to_dict("records")]
    return None


def _is_missing(value: Any) -> bool:
    """NaN, NaT and NA: what pandas has where a cell is empty."""
    return (isinstance(value, float) and value != value) or type(value).__name__ in ("NaTType", "NAType")


def _plain(value: Any) -> Any:
    """Arrays and their numbers as Python has them; pictures and times as text."""
    if (picture := as_json(value)) is not None:
        return picture
    return value.tolist() if hasattr(value, "tolist") else str(value)
