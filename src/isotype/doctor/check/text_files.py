"""JSON, YAML and TOML with the line of every key. Nothing read is ever executed.

JSON may have comments and trailing commas, as several trainers' files have them. Plain words of YAML are resolved as YAML 1.1 does
(PyYAML, as the trainers): an unquoted `no` is False. TOML's values come from `tomllib`, its lines from a scan of its plain syntax.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from json.decoder import scanstring  # type: ignore[attr-defined]  # public in CPython, unknown to typeshed
from typing import Any

Path = tuple[str | int, ...]


class Unreadable(ValueError):
    """line: where it stopped making sense; None in a binary file."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


@dataclass(slots=True)
class Tree:
    data: Any
    lines: dict[Path, int] = field(default_factory=dict)

    def leaves(self) -> Iterator[tuple[str, Any, int | None]]:
        """(dotted key, value, line); empty containers and lists of plain values count as leaves."""
        yield from self._leaves(self.data, ())

    def _leaves(self, node: Any, path: Path) -> Iterator[tuple[str, Any, int | None]]:
        if isinstance(node, dict) and node:
            for key, value in node.items():
                yield from self._leaves(value, (*path, key))
        elif isinstance(node, list) and any(isinstance(item, dict) for item in node):
            for index, value in enumerate(node):
                yield from self._leaves(value, (*path, index))
        elif path:
            yield ".".join(map(str, path)), node, self.lines.get(path)


_SPACE = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/|#[^\n]*)*", re.S)
_NUMBER = re.compile(r"-?(?:Infinity|NaN|\d+(?P<rest>(?:\.\d*)?(?:[eE][-+]?\d+)?))")
_WORDS = {"true": True, "false": False, "null": None, "NaN": float("nan")}


def read_json(text: str) -> Tree:
    """Raises Unreadable."""
    return _Json(text.removeprefix("\ufeff")).read()


class _Json:
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

    def fail(self, what: str) -> Unreadable:
        return Unreadable(what, self.text.count("\n", 0, self.at) + 1)

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


_BOOL = {w: w in ("yes", "true", "on") for w in ("yes", "no", "true", "false", "on", "off")}
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$")
_FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?$|^[-+]?\.[0-9_]+(?:[eE][-+]?[0-9]+)?$")


MOST_VALUES = 200_000


def read_yaml(text: str) -> Tree:
    """The first document of a file. Raises Unreadable."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        with warnings.catch_warnings(action="ignore"):  # an anchor may be given again
            root = next(iter(YAML(typ="safe", pure=True).compose_all(text)), None)
    except MarkedYAMLError as error:
        raise Unreadable(str(error.problem or error), (error.problem_mark.line + 1) if error.problem_mark else 1) from error
    except (YAMLError, ValueError, RecursionError) as error:
        raise Unreadable(str(error).splitlines()[0], 1) from error
    tree = Tree(None)
    if root is not None:
        tree.data = _value(root, (), tree, 0)
    return tree


def scalar(word: str) -> Any:
    """A plain (unquoted) word as YAML 1.1 reads it: `1e-5` without a dot stays a string."""
    lower = word.lower()
    if lower in ("", "~", "null"):
        return None
    if lower in _BOOL and word in (lower, lower.upper(), lower.capitalize()):
        return _BOOL[lower]
    if _INT.match(word):
        return int(word.replace("_", ""))
    if _FLOAT.match(word):
        return float(word.replace("_", ""))
    return word


def _value(node: Any, path: Path, tree: Tree, depth: int) -> Any:
    if depth > 100:
        raise Unreadable("nested too deeply", node.start_mark.line + 1)
    if len(tree.lines) > MOST_VALUES:  # aliases of aliases grow without end
        raise Unreadable(f"more than {MOST_VALUES} values", node.start_mark.line + 1)
    tree.lines.setdefault(path, node.start_mark.line + 1)
    if node.id == "mapping":
        result: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            tree.lines[(*path, key)] = key_node.start_mark.line + 1
            if key == "<<":
                for source in value_node.value if value_node.id == "sequence" else [value_node]:
                    merged.update(_value(source, path, tree, depth + 1))
                continue
            result[key] = _value(value_node, (*path, key), tree, depth + 1)
        return {**merged, **result}
    if node.id == "sequence":
        return [_value(item, (*path, i), tree, depth + 1) for i, item in enumerate(node.value)]
    return scalar(node.value) if node.style in (None, "") else node.value


_TABLE = re.compile(r"^\s*\[\[?\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"^\s*((?:[\w-]+|\"[^\"]+\")(?:\s*\.\s*(?:[\w-]+|\"[^\"]+\"))*)\s*=")


def read_toml(text: str) -> Tree:
    """Raises Unreadable."""
    import tomllib

    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"at line (\d+)", str(error))
        raise Unreadable(str(error), int(where[1]) if where else 1) from error
    tree = Tree(data)
    table: Path = ()
    for number, line in enumerate(text.splitlines(), 1):
        if match := _TABLE.match(line):
            table = _parts(match[1])
            tree.lines.setdefault(table, number)
        elif match := _KEY.match(line):
            tree.lines.setdefault((*table, *_parts(match[1])), number)
    return tree


def _parts(dotted: str) -> Path:
    return tuple(part.strip().strip('"') for part in dotted.split("."))
