"""Reads files as lines: file endings, gzip, encodings. `records.py` makes rows of them.

Lines are read as bytes, one at a time, so that a large file needs only the memory of one record,
and a byte that is not UTF-8 is reported with its position. Every record stores its file and its
line, or its row number.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shlex
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast
from unicodedata import normalize

from ..errors import UsageError
from ..wording import closest_file_name

JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
TABLE_ENDINGS = (".csv", ".tsv", ".parquet")
TEXT_ENDINGS = (".txt", ".text", ".md", ".rst")
# programs' sources, read as text where a name or pattern ends so: a folder of data may hold the
# script that made it
CODE_ENDINGS = (
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".kt", ".scala", ".swift", ".js", ".jsx",
    ".ts", ".tsx", ".rb", ".php", ".pl", ".lua", ".sh", ".jl", ".r", ".m", ".cs", ".hs", ".ml", ".zig", ".tex", ".css",
)  # fmt: skip
DATA_ENDINGS = JSON_ENDINGS + TABLE_ENDINGS
ENDINGS = DATA_ENDINGS + TEXT_ENDINGS
_BOMS = ((b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"))
# the first bytes of what is often given under the name of a text file, what it is, and the ending
# under which it is read ("": none)
_OTHER_FORMATS = (
    (b"\x1f\x8b", "compressed with gzip", ".gz"),
    (b"PAR1\x15", "Parquet", ".parquet"),
    (b"PK\x03\x04", "a zip archive, as a spreadsheet (.xlsx) is too", ""),
)
_LINE_ENDS = re.compile(r"\s*[\r\n]\s*")


class NoRows(UsageError):
    """A file that can be read and holds no row."""


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a file, and where it begins: a line, or with `unit` "row" the row's number, from
    1.
    """

    file: str
    line: int
    value: Any
    unit: str = "line"
    error: str | None = None
    """Why the row could not be read; its value is None then."""
    row: int | None = None
    """The row's number, from 1, where another one begins before it in its line."""

    @property
    def location(self) -> str:
        if self.unit != "line":
            return f"{self.file}, {self.unit} {self.line}"
        return f"{self.file}:{self.line}" + (f", row {self.row}" if self.row else "")


def file_suffix(path: Path) -> str:
    """What a file is, by its name: `.jsonl` for `a.jsonl` and `a.jsonl.gz`."""
    if path.suffix.lower() == ".gz":
        return Path(path.stem).suffix.lower()
    return path.suffix.lower()


def column_name(cell: str) -> str:
    """A column's name as a row has it: in one line, where a spreadsheet wraps it, and its letters
    composed (ü as one character).
    """
    return normalize("NFC", _LINE_ENDS.sub(" ", cell.strip()))


def require_file(
    name: str,
    endings: tuple[str, ...] = ENDINGS,
    *,
    accept_empty: bool = False,
    other_fix: str | None = None,
) -> Path:
    """The path of a readable, regular file with one of the endings, or an error that says what is
    there instead.

    accept_empty  a file without a byte is accepted too
    other_fix  what to do with a file of another ending where its ending does not say it
    """
    path = Path(name).expanduser()
    if os.path.isdir(path):
        raise UsageError(f"{name}: is a folder; name a file in it")
    if not os.path.exists(path):  # nor where the name is longer than a file name may be
        if message := missing_name_hint(name):
            raise UsageError(f"{name}: no such file", fix=message)
        if path.parent.is_dir():
            names = [p.name for p in path.parent.iterdir() if file_suffix(p) in endings]
        else:
            names = []
        near = closest_file_name(path.name, names)
        hint = f", did you mean {path.parent / near}?" if near else ""
        if (
            not hint
            and re.fullmatch(r"[\w.-]+/[\w.-]+", name)
            and not path.suffix
            and not path.parent.exists()
        ):
            hint = f"; a dataset of the hub is named hf:{name}"
        relative = (
            f"relative names begin in the working directory, {Path.cwd()}; a run that has any is"
            " resumed where it was started"
        )
        raise UsageError(
            f"{name}: no such file{hint}", fix=None if hint or path.is_absolute() else relative
        )
    if not path.is_file():
        raise UsageError(
            f"{name}: not a regular file",
            fix="a run reads its data more than once: write it to a file first",
        )
    if file_suffix(path) not in endings or (
        path.suffix.lower() == ".gz" and file_suffix(path) == ".parquet"
    ):
        message = (
            f"{name}: the ending {path.suffix or '(none)'} says no known format; use one of"
            f" {', '.join(endings)}"
        )
        raise UsageError(message, fix=_CONVERSION_FIXES.get(file_suffix(path)) or other_fix)
    try:
        with path.open("rb") as file:
            if not file.read(1) and not accept_empty:
                raise UsageError(f"{name}: the file is empty")
    except OSError as error:
        raise UsageError(f"{name}: cannot be read: {error.strerror}") from None
    return path


def decode_line(raw: bytes, *, file: str, offset: int) -> tuple[str, tuple[str, str] | None]:
    """The text of a line, and what is wrong with its bytes, with the fix. Raises UsageError where
    the file is of another kind.

    offset  of its first byte in the file
    """
    if offset == 0:
        for bom, encoding in _BOMS:
            if raw.startswith(bom):
                raise UsageError(
                    f"{file}:1: byte 0: the file is {encoding}; save it as UTF-8",
                    fix=_conversion_command(file, encoding),
                )
        for mark, kind, suffix in _OTHER_FORMATS:
            if raw.startswith(mark):
                fix = (
                    "unpack it, or save the sheet as CSV in UTF-8, and give the file that comes out"
                )
                if suffix:
                    fix = f"mv {shlex.quote(file)} {shlex.quote(file + suffix)}, and give that name"
                raise UsageError(f"{file}: the file is {kind}, and no text", fix=fix)
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    if (index := raw.find(b"\0")) >= 0:
        read = "gzip -dc" if Path(file).suffix.lower() == ".gz" else "cat"
        fix = (
            f"{read} {shlex.quote(file)} | tr -d '\\000' > no_zeros{file_suffix(Path(file))}   # if the"
            " rest is text"
        )
        return raw.decode("utf-8", "replace"), (
            f"byte {offset + index} is zero, which is no text",
            fix,
        )
    try:
        return raw.decode("utf-8"), None
    except UnicodeDecodeError as error:
        reason = (
            f"byte {offset + error.start} (0x{raw[error.start]:02x}) is not UTF-8; save the file as"
            " UTF-8"
        )
        return raw.decode("utf-8", "replace"), (
            reason,
            _conversion_command(file, "CP1252") + "   # if it is Windows' or Latin-1",
        )


def _conversion_command(file: str, encoding: str) -> str:
    """A command for a file that is not compressed; its name may not be one a shell takes as it is."""
    return f"iconv -f {encoding} -t UTF-8 {shlex.quote(file)} > utf8{Path(file).suffix}"


def is_prose(path: Path) -> bool:
    """Whether the ending is that of a plain text, not of a program's source."""
    return file_suffix(path) in TEXT_ENDINGS


# a text that begins so is JSON: an object with a key, or a list of them
_JSON_ROWS = re.compile(r'\s*(\[\s*)?\{\s*"[^"\n]{1,100}"\s*:')
_SAMPLED_LINES = 20


def looks_like_json(path: Path, name: str) -> bool:
    """Whether a file of another ending begins as JSON rows do."""
    lines = islice(text_lines(path, name), _SAMPLED_LINES)
    return _JSON_ROWS.match("".join(line for _, line in lines)) is not None


def text_lines(path: Path, name: str) -> Iterator[tuple[int, str]]:
    """Line numbers and lines (line ends kept) of a plain or gzipped file."""
    for number, offset, raw in raw_lines(path, name):
        text, problem = decode_line(raw, file=name, offset=offset)
        if problem:
            raise UsageError(f"{name}:{number}: {problem[0]}", fix=problem[1])
        yield number, text


def raw_lines(path: Path, name: str) -> Iterator[tuple[int, int, bytes]]:
    """Line numbers, offsets in the file and bytes of the lines of a plain or gzipped file."""
    offset = number = 0
    with _open_file(path) as file:
        try:
            for number, raw in enumerate(file, start=1):
                yield number, offset, raw
                offset += len(raw)
        except _UNREADABLE as error:
            raise _unreadable_error(error, name, number + 1) from None


def first_line(path: Path) -> str:
    """The beginning of the first line that is not blank, without white space around it; "" of a
    file that cannot be read.
    """
    try:
        with _open_file(path) as file:
            return str(
                file.read(1 << 16)
                .decode("utf-8", "replace")
                .lstrip("\ufeff \t\r\n")
                .partition("\n")[0]
                .rstrip()
            )
    except _UNREADABLE:
        return ""


_UNREADABLE = (gzip.BadGzipFile, EOFError, zlib.error, OSError)


def _unreadable_error(error: Exception, name: str, line: int) -> UsageError:
    if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
        return UsageError(f"{name}:{line}: cannot be read: {error.strerror or error}")
    if isinstance(error, gzip.BadGzipFile) and line == 1 and "Not a gzipped file" in str(error):
        fix = (
            f"if it is not compressed: mv {shlex.quote(name)}"
            f" {shlex.quote(str(Path(name).with_suffix('')))}, and give that name"
        )
    else:
        fix = (
            f"copy or download the file again; gzip -t {shlex.quote(name)} tells whether it is"
            " whole"
        )
    return UsageError(f"{name}:{line}: broken gzip: {error}", fix=fix)


def _open_file(path: Path) -> IO[bytes]:
    if path.suffix.lower() == ".gz":
        return cast(IO[bytes], gzip.open(path))
    return path.open("rb")


def read_text(path: Path, name: str) -> str:
    """The whole of a plain text file, line ends as `\\n`."""
    text = "".join(line for _, line in text_lines(path, name)).replace("\r\n", "\n")
    if not text.strip():
        raise UsageError(f"{name}: the file holds only white space")
    return text


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ending -> how a file becomes one that is read
_CONVERSION_FIXES = {
    **dict.fromkeys(
        (".zst", ".xz", ".bz2", ".zip", ".7z", ".tar", ".tgz"),
        "unpack it, and give the file that comes out",
    ),
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "save the sheet as CSV in UTF-8"),
    **dict.fromkeys((".arrow", ".feather"), "write it as Parquet"),
    **dict.fromkeys((".sqlite", ".db", ".sql"), "write the table as CSV"),
    **dict.fromkeys(
        (".pkl", ".pickle"),
        "a pickle can run code and is not opened: write it as JSON lines or Parquet where it was"
        " made",
    ),
    **dict.fromkeys((".yaml", ".yml"), "write it as JSON, one object a line"),
    **dict.fromkeys((".html", ".pdf", ".docx"), "take its text out into a .txt file"),
}


def missing_name_hint(name: str) -> str | None:
    """What was meant by the name of a file that is not there, where its form says it."""
    if re.match(r"[a-z][a-z0-9+.-]*://", name):
        return "a run reads local files: download it first, or name a dataset of the hub, hf:NAME"
    if name == "-":
        return "a run reads its data more than once: write it to a file first, COMMAND > data.jsonl"
    parts = [part for part in re.split(r"[,;\s]+", name) if part]
    if len(parts) > 1 and all(Path(part).expanduser().exists() for part in parts):
        return (
            f"several sources are a list: data.train=[{', '.join(parts)}], or --data once for each"
        )
    return None
