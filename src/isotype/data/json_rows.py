"""The rows of a JSON file: one object a line, an array, which may be one line, or objects over several lines.

Lines are read one at a time. The text of an array is held while it is read, and its values are parsed one at a time: 119 MiB take as much
memory, where `json.loads` took 739. Objects have each key once: `json` alone keeps the last of two equal keys and does not report the
others.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .read import Record, decoded_line, ending, first_line, raw_lines, text_lines

MOST = 4 << 30  # bytes of an array's file
_BLANK = re.compile(r"[ \t\n\r]*")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SEVERAL_LINES = "; an array, or objects over several lines, are read from a file named .json"


def read_json(path: Path, name: str, *, skip: int = 0) -> Iterator[Record]:
    """The records of a JSON file in order. `skip`: so many are passed over, in a file of lines without being parsed."""
    first = first_line(path) if ending(path) == ".json" else ""
    if first[:1] != "[" and first != "{":  # a line that is one brace alone opens an object of several lines
        yield from _lines(path, name, skip)
        return
    before = 0  # the line of the row before
    for i, record in enumerate(_array(path, name) if first[:1] == "[" else _objects(path, name)):
        if i >= skip:
            yield replace(record, row=i + 1) if record.line == before else record
        before = record.line


def _lines(path: Path, name: str, skip: int) -> Iterator[Record]:
    decoder = ObjectDecoder()
    for number, offset, raw in raw_lines(path, name):
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
    if text in ("{", "[", "]", "}"):
        return _SEVERAL_LINES
    if rest == ",":
        return "; a row has no comma behind it where each line is a row"
    if text.startswith("{'"):
        return "; Python's own notation is no JSON: json.dumps writes it"
    if rest.startswith("{"):
        return "; each line holds one object"
    return ""


class _Text:
    """A file's text. `at` is where parsing stands in it. Raises UsageError for a file that is too large."""

    def __init__(self, path: Path, name: str) -> None:
        if (size := path.stat().st_size) > MOST:
            fix = f"one object a line: jq -c '.[]' {shlex.quote(name)} > rows.jsonl"
            raise UsageError(f"{name}: {size >> 30} GiB of JSON that is not one object a line, and it is read as a whole", fix=fix)
        self.name, self.at = name, 0
        self.text = "".join(line for _, line in text_lines(path, name))
        self.decoder = ObjectDecoder()
        self._mark, self._line = 0, 1  # a place, and its line

    def place(self, at: int) -> tuple[int, int]:
        """Line and column, from 1, of a character that is not before those already asked for."""
        self._line += self.text.count("\n", self._mark, at)
        self._mark = at
        return self._line, at - self.text.rfind("\n", 0, at)

    def next_character(self) -> str:
        """The next one that is no white space, "" at the end of the file; parsing then stands there."""
        self.at = _BLANK.match(self.text, self.at).end()  # type: ignore[union-attr]  # it matches nothing too
        return self.text[self.at : self.at + 1]

    def record(self) -> Record:
        """The value that begins here; parsing continues after it."""
        line, _ = self.place(self.at)
        try:
            value, end = self.decoder.raw_decode(self.text, self.at)
        except json.JSONDecodeError as error:
            line, column = self.place(error.pos)
            raise UsageError(f"{self.name}:{line}: broken JSON at column {column}: {error.msg}") from None
        except (RecursionError, ValueError) as error:
            raise UsageError(f"{self.name}:{line}: {_impossible(error)}") from None
        source, self.at = self.text[self.at : end], end
        return _checked(self.name, line, value, source, self.decoder.repeated)


def _array(path: Path, name: str) -> Iterator[Record]:
    text = _Text(path, name)
    text.next_character()
    text.at += 1  # past the opening bracket
    if text.next_character() == "]":
        return
    while True:
        yield text.record()
        separator = text.next_character()
        line, _ = text.place(text.at)
        if separator == "]":
            text.at += 1
            if text.next_character():
                at = text.place(text.at)[0]
                raise UsageError(
                    f"{name}:{at}: text after the end of the array", fix="one file holds one array: give the rest its own file"
                )
            return
        if separator != ",":
            raise UsageError(f"{name}:{line}: broken JSON: ',' or ']' expected" + (", the file ends here" if not separator else ""))
        text.at += 1
        text.next_character()


def _objects(path: Path, name: str) -> Iterator[Record]:
    """Objects one after another, each over several lines."""
    text = _Text(path, name)
    while text.next_character():
        yield text.record()


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


class RepeatedKey(ValueError):
    """An object has a key twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key[:60]!r} is given twice in one object")


class ObjectDecoder(json.JSONDecoder):
    """Decodes as `json` does. `repeated` is then the first key that an object of the value has twice, or None.

    It does not raise in the middle of a value, so that a reader of many values knows where the next one begins.
    """

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=self._object)
        self.repeated: str | None = None

    def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
        self.repeated = None
        return super().raw_decode(s, idx)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs) and self.repeated is None:
            seen: set[str] = set()
            self.repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]  # add gives None
        return made


def loads(text: str) -> Any:
    """The value of a JSON text. Raises RepeatedKey, or what `json.loads` raises."""
    decoder = ObjectDecoder()
    value = decoder.decode(text)
    if decoder.repeated is not None:
        raise RepeatedKey(decoder.repeated)
    return value
