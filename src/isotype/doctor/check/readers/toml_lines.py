"""TOML with the line of every key: values from `tomllib`, lines from a scan of its plain syntax."""

from __future__ import annotations

import re

from .tree import Path, Tree

_TABLE = re.compile(r"^\s*\[\[?\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"^\s*((?:[\w-]+|\"[^\"]+\")(?:\s*\.\s*(?:[\w-]+|\"[^\"]+\"))*)\s*=")


class BadToml(ValueError):
    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


def read(text: str) -> Tree:
    """Raises BadToml."""
    import tomllib

    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"at line (\d+)", str(error))
        raise BadToml(str(error), int(where[1]) if where else 1) from error
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
