"""Reads JSON, YAML and TOML together with the line of every key. No content is executed.

JSON may have comments and trailing commas, which several trainers allow. PyYAML and the trainers
read unquoted values in YAML by the rules of YAML 1.1, and this module does the same. For example,
an unquoted `no` is False. `tomllib` parses TOML but does not report lines, so a second pass over
the text finds them.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

KeyPath = tuple[str | int, ...]


class UnreadableError(ValueError):
    """A file that cannot be parsed.

    line  the line at which parsing stopped; None for a binary file
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


@dataclass(slots=True)
class Tree:
    """The values of a YAML, TOML or JSON file.

    data   the nested dictionaries and lists
    lines  the path of keys to a value -> the line of the value
    """

    data: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def leaves(self) -> Iterator[tuple[str, Any, int | None]]:
        """Yields (dotted key, value, line) for each single value in the file. An empty container,
        or a list that contains only plain values, also counts as a single value.
        """
        yield from self._walk_leaves(self.data, ())

    def _walk_leaves(self, node: Any, path: KeyPath) -> Iterator[tuple[str, Any, int | None]]:
        if isinstance(node, dict) and node:
            for key, value in node.items():
                yield from self._walk_leaves(value, (*path, key))
        elif isinstance(node, list) and any(isinstance(item, dict) for item in node):
            for index, value in enumerate(node):
                yield from self._walk_leaves(value, (*path, index))
        elif path:
            yield ".".join(map(str, path)), node, self.lines.get(path)


_STRING = r'"(?:\\.|[^"\\])*"'
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|/\*.*?\*/|#[^\n]*", re.S)
_TRAILING_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])", re.S)
_TOKEN = re.compile(rf'(?P<key>{_STRING})\s*:|{_STRING}|[][{{}},]|[^\s\]\[{{}},:"]+', re.S)


def read_json(text: str) -> Tree:
    """Parses a JSON text. Raises UnreadableError."""
    plain = _TRAILING_COMMA.sub(
        _blank_match, _COMMENT.sub(_blank_match, text.removeprefix("\ufeff"))
    )
    try:
        return Tree(json.loads(plain, strict=False), _json_lines(plain))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnreadableError):
            raise
        raise UnreadableError(
            getattr(error, "msg", str(error)), getattr(error, "lineno", 1)
        ) from error


def _blank_match(match: re.Match[str]) -> str:
    """Replaces each character of a comment or a comma by a blank, except line breaks. Returns a
    string literal unchanged.
    """
    if match[0].startswith('"'):
        return match[0]
    return re.sub(r"[^\n]", " ", match[0])


def _json_lines(text: str) -> dict[KeyPath, int]:
    """Returns the line of every key and of every list entry in a JSON text."""
    lines: dict[KeyPath, int] = {}
    path: list[str | int] = []  # the current key or index in each enclosing container
    line = 1
    position = 0
    for token in _TOKEN.finditer(text):
        line = line + text.count("\n", position, token.start())
        position = token.start()
        if token["key"]:
            path[-1] = json.loads(token["key"], strict=False)
            lines[tuple(path)] = line
        elif token[0] in "}]":
            path.pop()
        elif token[0] == ",":
            path[-1] = path[-1] + 1 if isinstance(path[-1], int) else path[-1]
        else:
            lines.setdefault(tuple(path), line)
            if token[0] in "{[":
                path.append(0 if token[0] == "[" else "")
            if len(path) > 100:
                raise UnreadableError("nested too deeply", line)
    return lines


_BOOLEAN_VALUES = {
    w: w in ("yes", "true", "on") for w in ("yes", "no", "true", "false", "on", "off")
}
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?$|^[-+]?\.[0-9_]+(?:[eE][-+]?[0-9]+)?$"
)


MAX_VALUES = 200_000  # values of a file that are read


def read_yaml(text: str) -> Tree:
    """Parses the first document of a YAML text. Raises UnreadableError."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        with warnings.catch_warnings(action="ignore"):  # an anchor may be defined twice
            root = next(iter(YAML(typ="safe", pure=True).compose_all(text)), None)
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UnreadableError(str(error.problem or error), line) from error
    except (YAMLError, ValueError, RecursionError) as error:
        raise UnreadableError(str(error).splitlines()[0], 1) from error
    tree = Tree(None)
    if root is not None:
        tree.data = _node_value(root, (), tree, 0)
    return tree


def parse_scalar(text: str) -> Any:
    """Converts a plain (unquoted) scalar to a Python value by the rules of YAML 1.1. By these rules
    `1e-5` is a string, because it has no dot.
    """
    lower = text.lower()
    if lower in ("", "~", "null"):
        return None
    if lower in _BOOLEAN_VALUES and text in (lower, lower.upper(), lower.capitalize()):
        return _BOOLEAN_VALUES[lower]
    if _INT.match(text):
        return int(text.replace("_", ""))
    if _FLOAT.match(text):
        return float(text.replace("_", ""))
    return text


def _node_value(node: Any, path: KeyPath, tree: Tree, depth: int) -> Any:
    if depth > 100:
        raise UnreadableError("nested too deeply", node.start_mark.line + 1)
    if len(tree.lines) > MAX_VALUES:  # nested aliases can expand to a huge number of values
        raise UnreadableError(f"more than {MAX_VALUES} values", node.start_mark.line + 1)
    tree.lines.setdefault(path, node.start_mark.line + 1)
    if node.id == "mapping":
        result: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            tree.lines[(*path, key)] = key_node.start_mark.line + 1
            if key == "<<":
                is_list = value_node.id == "sequence"
                sources = value_node.value if is_list else [value_node]
                for source in sources:
                    merged.update(_node_value(source, path, tree, depth + 1))
                continue
            result[key] = _node_value(value_node, (*path, key), tree, depth + 1)
        return {**merged, **result}
    if node.id == "sequence":
        return [_node_value(item, (*path, i), tree, depth + 1) for i, item in enumerate(node.value)]
    if node.style in (None, ""):
        return parse_scalar(node.value)
    return node.value


_TABLE = re.compile(r"^\s*(?P<array>\[)?\[\s*(?P<name>[^\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"^\s*((?:[\w-]+|\"[^\"]+\")(?:\s*\.\s*(?:[\w-]+|\"[^\"]+\"))*)\s*=")


def read_toml(text: str) -> Tree:
    """Parses a TOML text. Raises UnreadableError."""
    import tomllib

    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        position = re.search(r"at line (\d+)", str(error))
        number = int(position[1]) if position else 1
        raise UnreadableError(str(error), number) from error
    tree = Tree(data)
    table: KeyPath = ()
    counts: dict[KeyPath, int] = {}  # of an array of tables: its tables so far
    for number, line in enumerate(text.splitlines(), 1):
        if match := _TABLE.match(line):
            table = _array_path(_split_dotted_key(match["name"]), counts)
            if match["array"]:
                counts[table] = counts.get(table, 0) + 1
                table = (*table, counts[table] - 1)
            tree.lines.setdefault(table, number)
        elif match := _KEY.match(line):
            tree.lines.setdefault((*table, *_split_dotted_key(match[1])), number)
    return tree


def _array_path(path: KeyPath, counts: dict[KeyPath, int]) -> KeyPath:
    """Returns the full path of a TOML table. If the table belongs to an array of tables, the path
    includes the index of the array's last entry.
    """
    complete: KeyPath = ()
    for part in path[:-1]:
        complete = (*complete, part)
        if complete in counts:
            complete = (*complete, counts[complete] - 1)
    return (*complete, path[-1])


def _split_dotted_key(dotted: str) -> KeyPath:
    return tuple(part.strip().strip('"') for part in dotted.split("."))
