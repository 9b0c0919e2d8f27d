"""Reads the lines of data files, plain or gzipped, and checks file endings and encodings.
`records.py` turns the lines into rows.

Lines are read one at a time, so that a large file needs no more memory than one record. Lines are
read as bytes, so that an error message can contain the position of a byte that is not valid UTF-8.
Every record stores the name of its file and its line or row number.
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

from ..config.sources import is_lfs_pointer, lfs_fix
from ..errors import UsageError
from ..wording import closest_file_name, format_binary_bytes

JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
TABLE_ENDINGS = (".csv", ".tsv", ".parquet")
TEXT_ENDINGS = (".txt", ".text", ".md", ".rst")
# endings of source code: read as plain text only if the name or pattern has this ending, because a
# folder of data may also contain the script that made it
CODE_ENDINGS = (
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".kt", ".scala", ".swift", ".js", ".jsx",
    ".ts", ".tsx", ".rb", ".php", ".pl", ".lua", ".sh", ".jl", ".r", ".m", ".cs", ".hs", ".ml", ".zig", ".tex", ".css",
)  # fmt: skip
DATA_ENDINGS = JSON_ENDINGS + TABLE_ENDINGS
ENDINGS = DATA_ENDINGS + TEXT_ENDINGS
# the first bytes of a file -> its encoding
_BOMS = ((b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"))
# formats whose files are often named like text files: (first bytes, name of the format, ending with
# which Isotype reads the file, or "" if Isotype cannot read it)
_OTHER_FORMATS = (
    (b"\x1f\x8b", "compressed with gzip", ".gz"),
    (b"PAR1\x15", "Parquet", ".parquet"),
    (b"PK\x03\x04", "a zip archive, as a spreadsheet (.xlsx) is too", ""),
)
MAX_LINE_BYTES = 1 << 27  # a line is held in memory; a gzip file of 3 MB can unpack to 3 GB
_LINE_ENDS = re.compile(r"\s*[\r\n]\s*")


class NoRows(UsageError):
    """Raised for a readable file that contains no row."""


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a file, and its position. The position is the number of the line on which the row
    begins. If `unit` is "row", the position is the number of the row, counted from 1.
    """

    file: str
    line: int
    value: Any
    unit: str = "line"
    error: str | None = None
    """The reason why the row could not be read; `value` is then None."""
    row: int | None = None
    """The row's number, from 1, if its line holds several rows and it is not the first of them."""

    @property
    def location(self) -> str:
        if self.unit != "line":
            return f"{self.file}, {self.unit} {self.line}"
        return f"{self.file}:{self.line}" + (f", row {self.row}" if self.row else "")


def file_suffix(path: Path) -> str:
    """Returns the ending of a file, ignoring a final `.gz`. For example, it returns `.jsonl` for
    `a.jsonl` and for `a.jsonl.gz`.
    """
    if path.suffix.lower() == ".gz":
        return Path(path.stem).suffix.lower()
    return path.suffix.lower()


def column_name(cell: str) -> str:
    """Normalises a column's name. Line breaks, which spreadsheets may contain, become spaces.
    Unicode letters are composed, so that ü is one character.
    """
    return normalize("NFC", _LINE_ENDS.sub(" ", cell.strip()))


def require_file(
    name: str,
    endings: tuple[str, ...] = ENDINGS,
    *,
    accept_empty: bool = False,
    unknown_ending_fix: str | None = None,
) -> Path:
    """Returns the path if it is a regular file that can be read and has one of the endings.
    Otherwise raises UsageError with a message that says what was found.

    accept_empty  whether a file of 0 bytes is accepted too
    unknown_ending_fix  the advice in the error message for a file with an unknown ending
    """
    path = Path(name).expanduser()
    if os.path.isdir(path):
        raise UsageError(f"{name}: is a folder; name a file in it")
    if not os.path.exists(path):  # also False for a name that is too long for a file
        if message := missing_name_hint(name):
            raise UsageError(f"{name}: no such file", fix=message)
        if path.parent.is_dir():
            names = [file.name for file in path.parent.iterdir() if file_suffix(file) in endings]
        else:
            names = []
        closest_name = closest_file_name(path.name, names)
        hint = f", did you mean {path.parent / closest_name}?" if closest_name else ""
        if (
            not hint
            and re.fullmatch(r"[\w.-]+/[\w.-]+", name)
            and not path.suffix
            and not path.parent.exists()
        ):
            hint = f"; a dataset of the hub is named hf:{name}"
        working_folder_hint = (
            f"relative names begin in the working directory, {Path.cwd()}; a run that has any is"
            " resumed where it was started"
        )
        raise UsageError(
            f"{name}: no such file{hint}",
            fix=None if hint or path.is_absolute() else working_folder_hint,
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
        raise UsageError(
            message, fix=_CONVERSION_FIXES.get(file_suffix(path)) or unknown_ending_fix
        )
    try:
        with path.open("rb") as file:
            if not file.read(1) and not accept_empty:
                raise UsageError(f"{name}: the file is empty")
        if is_lfs_pointer(path):
            raise UsageError(
                f"{name}: is a Git LFS pointer, without the rows", fix=lfs_fix(path.absolute())
            )
    except OSError as error:
        raise UsageError(f"{name}: cannot be read: {error.strerror}") from None
    return path


def decode_line(raw: bytes, *, file: str, offset: int) -> tuple[str, tuple[str, str] | None]:
    """Returns the text of a line and a description of what is wrong with it. This description is a
    pair (problem, fix) if some bytes are not valid text, otherwise None. Raises UsageError if the
    file has another format.

    offset  position of the line's first byte in the file
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
    """Returns a shell command with which the user can convert an uncompressed file to UTF-8."""
    return f"iconv -f {encoding} -t UTF-8 {shlex.quote(file)} > utf8{Path(file).suffix}"


def is_prose(path: Path) -> bool:
    """Returns True if the file's ending means plain text and not source code."""
    return file_suffix(path) in TEXT_ENDINGS


# JSON rows begin like this: an object with a key, or a list of objects
_JSON_ROWS = re.compile(r'\s*(\[\s*)?\{\s*"[^"\n]{1,100}"\s*:')
_SAMPLED_LINES = 20  # first lines of a file by which its kind is detected


def looks_like_json(path: Path, name: str) -> bool:
    """Returns True if a file begins like a file of JSON rows although its ending is another one."""
    lines = islice(text_lines(path, name), _SAMPLED_LINES)
    return _JSON_ROWS.match("".join(line for _, line in lines)) is not None


def text_lines(
    path: Path, name: str, *, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[tuple[int, str]]:
    """Yields the number and the text of each line of a plain or gzipped file. The text includes the
    line end.
    """
    for number, offset, raw in raw_lines(path, name, max_line_bytes=max_line_bytes):
        text, problem = decode_line(raw, file=name, offset=offset)
        if problem:
            raise UsageError(f"{name}:{number}: {problem[0]}", fix=problem[1])
        yield number, text


def raw_lines(
    path: Path, name: str, *, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[tuple[int, int, bytes]]:
    """Yields the number, the offset in the file and the bytes of each line of a plain or gzipped
    file. Raises UsageError if a line has more than `max_line_bytes` bytes. The rest of such a line
    is not read.
    """
    offset = number = 0
    with _open_file(path) as file:
        try:
            lines = iter(lambda: file.readline(max_line_bytes + 1), b"")
            for number, raw in enumerate(lines, start=1):
                if len(raw) > max_line_bytes:
                    raise _long_line_error(path, name, number, max_line_bytes)
                yield number, offset, raw
                offset += len(raw)
        except _READ_ERRORS as error:
            raise _unreadable_error(error, name, number + 1) from None


def _long_line_error(path: Path, name: str, number: int, max_line_bytes: int) -> UsageError:
    if file_suffix(path) in DATA_ENDINGS:
        fix = "one row per line; pictures as files that the rows name"
    else:
        fix = f"fold -s -w 100000 {shlex.quote(name)} > lines{path.suffix}, and give that file"
    message = f"{name}:{number}: the line is longer than {format_binary_bytes(max_line_bytes)}"
    return UsageError(message, fix=fix)


def first_line(path: Path) -> str:
    """Returns the beginning of the first line that is not blank, without white space at its ends.
    Returns "" if the file cannot be read.
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
    except _READ_ERRORS:
        return ""


# exceptions of a compressed file that cannot be read
_READ_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error, OSError)


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
    """Reads a whole plain text file, with line ends as `\\n`."""
    text = "".join(line for _, line in text_lines(path, name)).replace("\r\n", "\n")
    if not text.strip():
        raise UsageError(f"{name}: the file holds only white space")
    return text


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ending of an unsupported file -> how to convert it
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
    """Returns advice for a file that does not exist, if its name looks like a URL, `-` or a list of
    files. Otherwise returns None.
    """
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
