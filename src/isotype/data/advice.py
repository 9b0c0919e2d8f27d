"""What to do with a name that is no file of a known format: an address, several names in one, an archive, another program's file."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from urllib.parse import unquote

_TAKEN_APART = {
    ".zst": "zstd -d {file}", ".xz": "xz -dk {file}", ".bz2": "bzip2 -dk {file}", ".zip": "unzip {file}", ".7z": "7z x {file}",
    ".tar": "tar -xf {file}", ".tgz": "tar -xf {file}", ".tar.gz": "tar -xf {file}",
}  # fmt: skip
_SAVED_ANEW = {
    ".xlsx": "save the sheet as CSV in UTF-8", ".xls": "save the sheet as CSV in UTF-8", ".ods": "save the sheet as CSV in UTF-8",
    ".arrow": "write it as Parquet: pyarrow.parquet.write_table(pyarrow.feather.read_table({file!r}), 'data.parquet')",
    ".feather": "write it as Parquet: pyarrow.parquet.write_table(pyarrow.feather.read_table({file!r}), 'data.parquet')",
    ".sqlite": 'sqlite3 -csv -header {file} "SELECT ..." > data.csv', ".db": 'sqlite3 -csv -header {file} "SELECT ..." > data.csv',
    ".sql": "load it into its database and write the table as CSV",
    ".pkl": "a pickle can run code and is not opened: write it as JSON lines or Parquet where it was made",
    ".pickle": "a pickle can run code and is not opened: write it as JSON lines or Parquet where it was made",
    ".yaml": "write it as JSON, one object a line", ".yml": "write it as JSON, one object a line",
    ".html": "take its text out into a .txt file", ".pdf": "take its text out into a .txt file",
    ".docx": "take its text out into a .txt file",
}  # fmt: skip


def converted_by(path: Path) -> str | None:
    """How a file with another ending becomes one that is read, if that is known."""
    kind = "".join(path.suffixes[-2:]).lower()
    kind = kind if kind in _TAKEN_APART else path.suffix.lower()
    if command := _TAKEN_APART.get(kind):
        return f"{command.format(file=shlex.quote(str(path)))}, and give the file that comes out"
    return _SAVED_ANEW[kind].format(file=str(path)) if kind in _SAVED_ANEW else None


def another_name(name: str) -> str | None:
    """What was meant by the name of a file that is not there, where its form says it."""
    if name.startswith("file://"):
        return f"give the path alone: {unquote(name.removeprefix('file://localhost').removeprefix('file://'))}"
    if re.match(r"[a-z][a-z0-9+.-]*://", name):
        return "a run reads local files: download it first, or name a dataset of the hub, hf:NAME"
    if name == "-":
        return "a run reads its data more than once: write it to a file first, COMMAND > data.jsonl"
    if re.search(r"\$\w|\$\{|%\w+%", name):
        return "variables are replaced by the shell only: give the name without quotes, or with ~ for the home folder"
    parts = [part for part in re.split(r"[,;\s]+", name) if part]
    if len(parts) > 1 and all(Path(part).expanduser().exists() for part in parts):
        return f"several sources are a list: data.train=[{', '.join(parts)}], or --data once for each"
    return None
