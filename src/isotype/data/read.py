"""Files as lines and records: which endings are read, gzip, encodings; JSON is read here, tables in `tables.py`.

Lines are read one by one, as bytes, so that a large file costs no more memory than one record, and a byte that is not UTF-8 is
reported where it is. Every record knows its file and its line, or its row where a file has no lines.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..errors import UsageError
from .progress import Meter

JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
TABLE_ENDINGS = (".csv", ".tsv", ".parquet")
TEXT_ENDINGS = (".txt", ".text", ".md", ".rst")
DATA_ENDINGS = JSON_ENDINGS + TABLE_ENDINGS
ENDINGS = DATA_ENDINGS + TEXT_ENDINGS
_BOMS = ((b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"))
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a file, and where it begins: a line, or with `unit` "row" the row's number, from 1."""

    file: str
    line: int
    value: Any
    unit: str = "line"

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" if self.unit == "line" else f"{self.file}, {self.unit} {self.line}"


def ending(path: Path) -> str:
    """What a file is, by its name: `.jsonl` for `a.jsonl` and `a.jsonl.gz`."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def existing_file(name: str, endings: tuple[str, ...] = ENDINGS) -> Path:
    """The path of a readable, non-empty, regular file with one of the endings, or an error that says what is there instead."""
    path = Path(name).expanduser()
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if ending(p) in endings)[:3]
        hint = f"name a file in it ({', '.join(inside)})" if inside else f"it has no file that ends in {', '.join(endings)}"
        raise UsageError(f"{name}: is a folder; {hint}")
    try:
        there = path.exists()
    except OSError as error:  # a name longer than a file name may be
        raise UsageError(f"{name[:80]}: {error.strerror}") from None
    if not there:
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, beside, n=1)
        hint = f", did you mean {path.parent / close[0]}?" if close else ""
        if not hint and re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not path.suffix and not path.parent.exists():
            hint = f"; a dataset of the hub is named hf:{name}"
        raise UsageError(f"{name}: no such file{hint}")
    if not path.is_file():
        raise UsageError(f"{name}: not a regular file")
    if ending(path) not in endings or (path.suffix.lower() == ".gz" and ending(path) == ".parquet"):
        raise UsageError(f"{name}: the ending {path.suffix or '(none)'} says no known format; use one of {', '.join(endings)}")
    try:
        with path.open("rb") as file:
            if not file.read(1):
                raise UsageError(f"{name}: the file is empty")
    except OSError as error:
        raise UsageError(f"{name}: cannot be read: {error.strerror}") from None
    return path


def decoded(raw: bytes, *, file: str, line: int, offset: int) -> str:
    """The text of one line; `offset` is the file position of its first byte."""
    if line == 1:
        for bom, encoding in _BOMS:
            if raw.startswith(bom):
                raise UsageError(f"{file}:1: byte 0: the file is {encoding}; save it as UTF-8")
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        raise UsageError(f"{file}:{line}: byte {offset + error.start} (0x{byte:02x}) is not UTF-8; save the file as UTF-8") from None


def text_lines(path: Path, name: str, meter: Meter | None = None) -> Iterator[tuple[int, str]]:
    """Line numbers and lines (line ends kept) of a plain or gzipped file."""
    offset = number = 0
    with _opened(path, meter) as file:
        try:
            for number, raw in enumerate(file, start=1):
                yield number, decoded(raw, file=name, line=number, offset=offset)
                offset += len(raw)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UsageError(f"{name}:{number + 1}: broken gzip: {error}") from None
        except OSError as error:
            raise UsageError(f"{name}:{number + 1}: cannot be read: {error.strerror or error}") from None


@contextmanager
def _opened(path: Path, meter: Meter | None) -> Iterator[IO[bytes]]:
    with path.open("rb") as raw:
        if meter is not None:
            meter.reading(raw)
        file: Any = gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw
        try:
            yield file
        finally:
            if meter is not None:
                meter.read(raw)


def read_text(path: Path, name: str) -> str:
    """The whole of a plain text file, line ends as `\\n`."""
    text = "".join(line for _, line in text_lines(path, name)).replace("\r\n", "\n")
    if not text.strip():
        raise UsageError(f"{name}: the file holds only white space")
    return text


def read_json(path: Path, name: str, *, skip: int = 0, meter: Meter | None = None) -> Iterator[Record]:
    """The records of a JSON file in order. `skip`: so many are passed over, in a file of lines without being parsed."""
    if ending(path) == ".json" and _first_character(path, name) == "[":
        yield from _skipped(_array(path, name), skip)
    else:
        yield from _lines(path, name, skip, meter)


def _skipped(records: Iterable[Record], skip: int) -> Iterator[Record]:
    for i, record in enumerate(records):
        if i >= skip:
            yield record


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_character(path: Path, name: str) -> str:
    for _, line in text_lines(path, name):
        if line.strip():
            return line.strip()[0]
    return ""


def _lines(path: Path, name: str, skip: int, meter: Meter | None) -> Iterator[Record]:
    for number, line in text_lines(path, name, meter):
        if not line.strip():
            continue
        if skip:
            skip -= 1
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            hint = "; a .json file holds an array, or one object a line" if ending(path) == ".json" else ""
            raise UsageError(f"{name}:{number}: broken JSON at column {error.colno}: {error.msg}{hint}") from None
        except RecursionError:
            raise UsageError(f"{name}:{number}: JSON nested too deeply") from None
        except ValueError as error:  # a whole number of more than 4300 digits
            raise UsageError(f"{name}:{number}: broken JSON: {str(error).partition(';')[0]}") from None
        yield Record(name, number, _checked(value, line, f"{name}:{number}"))


def _array(path: Path, name: str) -> Iterator[Record]:
    text = "".join(line for _, line in text_lines(path, name))
    decoder = json.JSONDecoder()
    blank = re.compile(r"\s*")
    position = blank.match(text).end() + 1  # type: ignore[union-attr]  # past the opening bracket
    line, counted = 1, 0
    separator = "["
    while True:
        position = blank.match(text, position).end()  # type: ignore[union-attr]
        line, counted = line + text.count("\n", counted, position), position
        if text[position : position + 1] == "]" and separator == "[":
            return
        try:
            value, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise UsageError(f"{name}:{error.lineno}: broken JSON at column {error.colno}: {error.msg}") from None
        except RecursionError:
            raise UsageError(f"{name}:{line}: JSON nested too deeply") from None
        except ValueError as error:
            raise UsageError(f"{name}:{line}: broken JSON: {str(error).partition(';')[0]}") from None
        yield Record(name, line, _checked(value, text[position:end], f"{name}:{line}"))
        position = blank.match(text, end).end()  # type: ignore[union-attr]
        separator = text[position : position + 1]
        if separator == "]":
            rest = blank.match(text, position + 1).end()  # type: ignore[union-attr]
            if rest != len(text):
                raise UsageError(f"{name}:{text.count(chr(10), 0, rest) + 1}: text after the end of the array")
            return
        if separator != ",":
            at = text.count("\n", 0, position) + 1
            raise UsageError(f"{name}:{at}: broken JSON: ',' or ']' expected" + (", the file ends here" if not separator else ""))
        position += 1


def _checked(value: Any, source: str, place: str) -> Any:
    """Half of a surrogate pair is valid JSON and no valid text: tokenizers fail on it without naming the row."""
    if "\\u" in source.lower() and _SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        raise UsageError(f"{place}: a \\u escape is half of a surrogate pair, which is not text")
    return value
