"""The pictures that the rows of a JSONL, CSV or Parquet file name or hold. Several rows of one picture are several captions of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...data.json_rows import read_json
from ...data.read import JSON_ENDINGS, Record, ending
from ...data.tables import read_csv
from ...errors import UsageError
from .contents import Content, InFile, InParquet
from .folder_pictures import Complain
from .picture import Picture

NAMES: Mapping[str, tuple[str, ...]] = {
    "image": ("image", "file_name", "image_path", "path", "file"),
    "text": ("text", "caption", "captions", "prompt"),
    "mask": ("mask", "mask_path"),
}
ROW_ENDINGS = (*JSON_ENDINGS, ".csv", ".tsv", ".parquet")


def pictures_of_rows(file: Path, columns: Mapping[str, str] | None, key: str, complain: Complain) -> Iterator[Picture]:
    """The pictures of a file's rows, in order of their first row. Paths are relative to the file's folder.

    columns  the file's own names for `image`, `text`, `mask`
    key      the setting that names the file, for messages
    Raises   UsageError for a file that has no such columns, or is no table
    """
    found: dict[str, Picture] = {}
    names: dict[str, str] | None = None
    for record, cells in _rows(file):
        if record.wrong or not isinstance(record.value, dict):
            complain(record.place, record.wrong or "expected an object")
            continue
        if names is None:
            names = _names(file, record.value, columns, key)
        made = _picture(record, names, file, cells)
        if isinstance(made, str):
            complain(record.place, made)
            continue
        name, picture = made
        before = found.get(name)
        found[name] = picture if before is None else replace(before, captions=tuple(dict.fromkeys(before.captions + picture.captions)))
    yield from found.values()


def _rows(file: Path) -> Iterator[tuple[Record, tuple[int, int]]]:
    """Rows, and in Parquet their row group and their position in it."""
    if ending(file) == ".parquet":
        yield from _parquet_rows(file)
        return
    for record in (read_json if ending(file) in JSON_ENDINGS else read_csv)(file, str(file)):
        yield record, (0, 0)


def _parquet_rows(file: Path) -> Iterator[tuple[Record, tuple[int, int]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(file) as opened:
            for group in range(opened.metadata.num_row_groups):
                row = 0
                for batch in opened.iter_batches(256, row_groups=[group]):
                    for value in batch.to_pylist():
                        number += 1
                        yield Record(str(file), number, value, "row"), (group, row)
                        row += 1
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UsageError(f"{file}, row {number + 1}: broken Parquet: {str(error).splitlines()[0]}") from None


def _names(file: Path, row: Mapping[str, Any], columns: Mapping[str, str] | None, key: str) -> dict[str, str]:
    """Our key -> the file's column."""
    columns = columns or {}
    for ours, theirs in columns.items():
        if theirs not in row:
            raise UsageError(f"{key}: {file}: no column {theirs!r} (columns.{ours}): it has {', '.join(map(str, row))}")
    names = dict(columns)
    for ours, tried in NAMES.items():
        found = next((name for name in tried if name in row), None)
        if ours not in names and found is not None:
            names[ours] = found
    for ours in ("image", "text"):
        if ours not in names:
            raise UsageError(
                f"{key}: {file}: no column for the {ours} ({', '.join(NAMES[ours])}): it has {', '.join(map(str, row))}",
                fix=f"images.columns: {{{ours}: NAME}}",
            )
    return names


def _picture(record: Record, names: Mapping[str, str], file: Path, cells: tuple[int, int]) -> tuple[str, Picture] | str:
    """The picture and what names it, or what is wrong with the row."""
    row = record.value
    captions = _captions(row.get(names["text"]))
    if captions is None:
        return f"{names['text']}: expected a caption or a list of them, got {row.get(names['text'])!r:.60}"
    content = _content(row.get(names["image"]), names["image"], file, cells)
    if isinstance(content, str):
        return content
    mask: Content | str | None = None
    if "mask" in names and row.get(names["mask"]) not in (None, ""):
        mask = _content(row[names["mask"]], names["mask"], file, cells)
    if isinstance(mask, str):
        return mask
    name = str(content.path) if isinstance(content, InFile) else record.place
    return name, Picture(content, captions, record.place, mask=mask)


def _captions(given: Any) -> tuple[str, ...] | None:
    if isinstance(given, str):
        return (" ".join(given.split()),)
    if isinstance(given, list) and given and all(isinstance(one, str) for one in given):
        return tuple(dict.fromkeys(" ".join(one.split()) for one in given))
    return None


def _content(given: Any, column: str, file: Path, cells: tuple[int, int]) -> Content | str:
    if isinstance(given, dict) and isinstance(given.get("path"), str) and not given.get("bytes"):
        given = given["path"]
    if isinstance(given, bytes) or (isinstance(given, dict) and isinstance(given.get("bytes"), bytes)):
        return InParquet(file, column, *cells)
    if not isinstance(given, str) or not given.strip():
        return f"{column}: expected a picture's file, got {given!r:.60}"
    path = file.parent / given
    return InFile(path) if path.is_file() else f"{given}: no such picture"
