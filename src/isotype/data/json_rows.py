"""The rows of a JSON file: one object a line, an array, which may be one line of any length, or objects over several lines.

An array is parsed value by value from a window on the file that grows only as far as the value that is being read, so that a file larger
than memory can be read, tokenised and kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..json_objects import ObjectDecoder, RepeatedKey
from .progress import Meter
from .read import Record, decoded_line, ending, raw_lines, text_blocks

MOST = 1 << 28  # characters of one row: more is a bracket or a quote that is never closed
_BLANK = re.compile(r"[ \t\n\r]*")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SEVERAL_LINES = "; an array, or objects over several lines, are read from a file named .json"
_ESCAPE = 12  # characters that an escape may have: a failure so near to the end of the window may be the window's


def read_json(path: Path, name: str, *, skip: int = 0, meter: Meter | None = None) -> Iterator[Record]:
    """The records of a JSON file in order. `skip`: so many are passed over, in a file of lines without being parsed."""
    first = first_line(path, name) if ending(path) == ".json" else ""
    if first[:1] != "[" and first != "{":  # a line that is one brace alone opens an object of several lines
        yield from _lines(path, name, skip, meter)
        return
    before = 0  # the line of the row before
    for i, record in enumerate(_array(path, name, meter) if first[:1] == "[" else _objects(path, name, meter)):
        if i >= skip:
            yield replace(record, row=i + 1) if record.line == before else record
        before = record.line


def first_line(path: Path, name: str) -> str:
    """The beginning of the first line that is not blank, without white space around it."""
    text = ""
    for block in text_blocks(path, name):
        text = (text + block).lstrip()
        if len(text) > 1 or "\n" in text:
            break
    return text.partition("\n")[0].rstrip()


def _lines(path: Path, name: str, skip: int, meter: Meter | None) -> Iterator[Record]:
    decoder = ObjectDecoder()
    for number, offset, raw in raw_lines(path, name, meter):
        line, wrong = decoded_line(raw, file=name, line=number, offset=offset)
        if not line.strip():
            continue
        if skip:
            skip -= 1
            continue
        if wrong:
            yield Record(name, number, None, wrong=wrong)
            continue
        try:
            value = decoder.decode(line)
        except json.JSONDecodeError as error:
            hint = _nearly_json(line, error.pos)
            if ending(path) == ".json" and (not hint or hint == _SEVERAL_LINES):
                hint = "; a .json file holds an array, or one object a line"
            ends = error.pos >= len(line.rstrip())
            where = ": the line ends within a value" if ends else f" at column {error.pos + 1}: {error.msg}"
            yield Record(name, number, None, wrong=f"broken JSON{where}{hint}")
        except (RecursionError, ValueError) as error:
            yield Record(name, number, None, wrong=_impossible(error))
        else:
            if isinstance(value, list):
                hint = "" if ending(path) == ".json" else "; a file that is one array is named .json"
                yield Record(name, number, None, wrong=f"a row must be an object with keys, got a list{hint}")
                continue
            yield _checked(name, number, value, line, decoder.repeated)


def _nearly_json(line: str, at: int) -> str:
    """What to do with a line of what is often taken for JSON lines; "" where that is not known. `at`: where the error is."""
    text, rest = line.strip(), line[at:].strip()
    if text.startswith(("//", "/*", "#")):
        return "; JSON has no comments: remove the line"
    if text in ("{", "[", "]", "}"):
        return _SEVERAL_LINES
    if rest == ",":
        return "; a row has no comma behind it where each line is a row"
    if text.startswith("{'"):
        return "; Python's own notation is no JSON: json.dumps writes it"
    if rest.startswith("{"):
        return "; each line holds one object"
    return ""


class _Window:
    """A piece of a file's text. `at` is where parsing stands in it."""

    def __init__(self, path: Path, name: str, meter: Meter | None) -> None:
        self.name = name
        self._blocks = text_blocks(path, name, meter)
        self.text, self.at, self.whole = "", 0, False
        self.decoder = ObjectDecoder()
        self._mark, self._line, self._begin = (
            0,
            1,
            0,
        )  # a place, its line in the file, where in the window that begins

    def grow(self, least: int = 1) -> bool:
        """Lets go of what was parsed and reads at least so many characters more; False at the end of the file."""
        self.place(self.at)
        self._mark, self._begin = 0, self._begin - self.at
        read = [self.text[self.at :]]
        while least > 0 and (block := next(self._blocks, None)) is not None:
            read.append(block)
            least -= len(block)
        self.whole = least > 0
        self.text, self.at = "".join(read), 0
        return len(read) > 1

    def place(self, at: int) -> tuple[int, int]:
        """Line and column, from 1, of a character of the window that is not before those already asked for."""
        lines = self.text.count("\n", self._mark, at)
        if lines:
            self._begin = self.text.rfind("\n", self._mark, at) + 1
        self._mark, self._line = at, self._line + lines
        return self._line, at - self._begin + 1

    def next_character(self) -> str:
        """The next one that is no white space, "" at the end of the file; parsing then stands there."""
        while True:
            self.at = _BLANK.match(self.text, self.at).end()  # type: ignore[union-attr]  # it matches nothing too
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.grow():
                return ""

    def value(self) -> tuple[Any, str]:
        """The value that begins here and its source; parsing continues after it. A window that is too small is doubled."""
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.at)
                if self.whole or self.text[end - 1] in '}]"' or end + 2 < len(self.text):  # a number may go on with `.5` or `e-5`
                    source, self.at = self.text[self.at : end], end
                    return value, source
            except json.JSONDecodeError as error:
                if self.whole or not (error.msg.startswith("Unterminated string") or error.pos > len(self.text) - _ESCAPE):
                    raise self.broken(error) from None
            except (RecursionError, ValueError) as error:
                raise UsageError(f"{self.name}:{self.place(self.at)[0]}: {_impossible(error)}") from None
            if len(self.text) - self.at > MOST:
                line, _ = self.place(self.at)
                raise UsageError(f"{self.name}:{line}: a row of more than {MOST >> 20} M characters: a bracket or a quote is not closed")
            self.grow(max(1, len(self.text) - self.at))

    def broken(self, error: json.JSONDecodeError) -> UsageError:
        line, column = self.place(error.pos)
        comment = self.text.startswith(("//", "/*", "#"), error.pos)
        hint = "; JSON has no comments: remove it" if comment else ""
        return UsageError(f"{self.name}:{line}: broken JSON at column {column}: {error.msg}{hint}")


def _array(path: Path, name: str, meter: Meter | None) -> Iterator[Record]:
    window = _Window(path, name, meter)
    window.next_character()
    window.at += 1  # past the opening bracket
    if window.next_character() == "]":
        return
    while True:
        line, _ = window.place(window.at)
        value, source = window.value()
        yield _checked(name, line, value, source, window.decoder.repeated)
        separator = window.next_character()
        line, _ = window.place(window.at)
        if separator == "]":
            window.at += 1
            if window.next_character():
                at = window.place(window.at)[0]
                raise UsageError(
                    f"{name}:{at}: text after the end of the array", fix="one file holds one array: give the rest its own file"
                )
            return
        if separator != ",":
            raise UsageError(f"{name}:{line}: broken JSON: ',' or ']' expected" + (", the file ends here" if not separator else ""))
        window.at += 1
        if window.next_character() == "]":
            raise UsageError(f"{name}:{line}: broken JSON: a comma before the closing bracket", fix="remove the comma")


def _objects(path: Path, name: str, meter: Meter | None) -> Iterator[Record]:
    """Objects one after another, each over several lines."""
    window = _Window(path, name, meter)
    while window.next_character():
        line, _ = window.place(window.at)
        value, source = window.value()
        yield _checked(name, line, value, source, window.decoder.repeated)


def _impossible(error: Exception) -> str:
    """What is JSON, and no value of Python's: nested too deeply, or a whole number of more than 4300 digits."""
    if isinstance(error, RecursionError):
        return "JSON nested too deeply"
    return f"broken JSON: {str(error).partition(';')[0]}"


def _checked(name: str, line: int, value: Any, source: str, repeated: str | None) -> Record:
    """A row, unless it is ambiguous or no text. Half of a surrogate pair is valid JSON, and tokenizers fail on it without naming the row.

    repeated  a key that an object of the row has twice
    """
    if repeated is not None:
        return Record(name, line, None, wrong=str(RepeatedKey(repeated)))
    if "\\u" in source.lower() and _SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        return Record(name, line, None, wrong="a \\u escape is half of a surrogate pair, which is not text")
    return Record(name, line, value)
