"""Reads data files: `.jsonl`, `.json` (an array, or one object a line) and plain text. Every record knows its file and line.

Lines are read one by one, as bytes, so that a large file costs no more memory than its records, and a byte that is not UTF-8 is
reported where it is.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError

JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
TEXT_ENDINGS = (".txt", ".text", ".md", ".rst")
_BOMS = ((b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"))
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Record:
    """One JSON value of a file, where it begins."""

    file: str
    line: int
    value: Any

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def existing_file(name: str, endings: tuple[str, ...] = JSON_ENDINGS + TEXT_ENDINGS) -> Path:
    """The path of a readable, non-empty, regular file with one of the endings, or an error that says what is there instead."""
    path = Path(name).expanduser()
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.suffix in endings)[:3]
        hint = f"name a file in it ({', '.join(inside)})" if inside else f"it has no file that ends in {', '.join(endings)}"
        raise UsageError(f"{name}: is a folder; {hint}")
    if not path.exists():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, beside, n=1)
        raise UsageError(f"{name}: no such file" + (f", did you mean {path.parent / close[0]}?" if close else ""))
    if not path.is_file():
        raise UsageError(f"{name}: not a regular file")
    if path.suffix.lower() not in endings:
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


def text_lines(path: Path, name: str) -> Iterator[tuple[int, str]]:
    """Line numbers and lines (line ends kept)."""
    offset = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            yield number, decoded(raw, file=name, line=number, offset=offset)
            offset += len(raw)


def read_text(path: Path, name: str) -> str:
    """The whole of a plain text file, line ends as `\\n`."""
    text = "".join(line for _, line in text_lines(path, name)).replace("\r\n", "\n")
    if not text.strip():
        raise UsageError(f"{name}: the file holds only white space")
    return text


def read_records(path: Path, name: str, limit: int | None = None) -> Iterator[Record]:
    """The records of a JSON file in order, at most `limit`."""
    records = _array(path, name) if path.suffix.lower() == ".json" and _first_character(path, name) == "[" else _lines(path, name)
    count = 0
    for record in records:
        if limit is not None and count >= limit:
            return
        count += 1
        yield record
    if not count:
        raise UsageError(f"{name}: the file holds no rows")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_character(path: Path, name: str) -> str:
    for _, line in text_lines(path, name):
        if line.strip():
            return line.strip()[0]
    return ""


def _lines(path: Path, name: str) -> Iterator[Record]:
    for number, line in text_lines(path, name):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            hint = "; a .json file holds an array, or one object a line" if path.suffix.lower() == ".json" else ""
            raise UsageError(f"{name}:{number}: broken JSON at column {error.colno}: {error.msg}{hint}") from None
        except RecursionError:
            raise UsageError(f"{name}:{number}: JSON nested too deeply") from None
        except ValueError:  # Python reads no whole number of more than 4300 digits
            raise UsageError(f"{name}:{number}: a number with thousands of digits") from None
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
        except ValueError:
            raise UsageError(f"{name}:{line}: a number with thousands of digits") from None
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
