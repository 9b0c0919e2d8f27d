"""JSON with the line of every key. Accepts comments and trailing commas, as several trainers' files have them."""

from __future__ import annotations

import re
from json.decoder import scanstring  # type: ignore[attr-defined]  # public in CPython, unknown to typeshed
from typing import Any

from .tree import Path, Tree

_SPACE = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/|#[^\n]*)*", re.S)
_NUMBER = re.compile(r"-?(?:Infinity|NaN|\d+(?P<rest>(?:\.\d*)?(?:[eE][-+]?\d+)?))")
_WORDS = {"true": True, "false": False, "null": None, "NaN": float("nan")}


class BadJson(ValueError):
    """line: where it stopped making sense."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


def read(text: str) -> Tree:
    """Raises BadJson."""
    return _Reader(text.removeprefix("\ufeff")).read()


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.tree = Tree(None)
        self.counted_to, self.line_there = 0, 1

    def line(self) -> int:
        self.line_there += self.text.count("\n", self.counted_to, self.at)
        self.counted_to = self.at
        return self.line_there

    def skip(self) -> str:
        match = _SPACE.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        return self.text[self.at : self.at + 1]

    def fail(self, what: str) -> BadJson:
        return BadJson(what, self.text.count("\n", 0, self.at) + 1)

    def read(self) -> Tree:
        self.tree.data = self.value((), 0)
        if self.skip():
            raise self.fail("text after the end of the JSON value")
        return self.tree

    def value(self, path: Path, depth: int) -> Any:
        if depth > 100:
            raise self.fail("nested too deeply")
        first = self.skip()
        self.tree.lines.setdefault(path, self.line())
        if first == "{":
            return self.object(path, depth)
        if first == "[":
            return self.array(path, depth)
        if first == '"':
            return self.string()
        for word, value in _WORDS.items():
            if self.text.startswith(word, self.at):
                self.at += len(word)
                return value
        if match := _NUMBER.match(self.text, self.at):
            self.at = match.end()
            return float(match[0]) if match["rest"] or not match[0].lstrip("-").isdigit() else int(match[0])
        raise self.fail("expected a value" if first else "unexpected end of file")

    def string(self) -> str:
        try:
            value, self.at = scanstring(self.text, self.at + 1, False)
        except ValueError as error:
            raise self.fail(str(error)) from error
        return str(value)

    def object(self, path: Path, depth: int) -> dict[str, Any]:
        self.at += 1
        result: dict[str, Any] = {}
        while (first := self.skip()) != "}":
            if first != '"':
                raise self.fail("expected a key in double quotes" if first else "unexpected end of file")
            line, key = self.line(), self.string()
            if key in result:
                self.tree.repeated.append(((*path, key), line))
            self.tree.lines[(*path, key)] = line
            if self.skip() != ":":
                raise self.fail(f"expected ':' after {key!r}")
            self.at += 1
            result[key] = self.value((*path, key), depth + 1)
            if self.skip() == ",":
                self.at += 1
            elif self.skip() != "}":
                raise self.fail("expected ',' or '}'")
        self.at += 1
        return result

    def array(self, path: Path, depth: int) -> list[Any]:
        self.at += 1
        result: list[Any] = []
        while (first := self.skip()) != "]":
            if not first:
                raise self.fail("unexpected end of file")
            result.append(self.value((*path, len(result)), depth + 1))
            if self.skip() == ",":
                self.at += 1
            elif self.skip() != "]":
                raise self.fail("expected ',' or ']'")
        self.at += 1
        return result
