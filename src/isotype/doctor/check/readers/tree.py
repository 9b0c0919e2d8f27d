"""What the readers of JSON, YAML and TOML return: nested values and the line of each path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Path = tuple[str | int, ...]


@dataclass(slots=True)
class Tree:
    data: Any
    lines: dict[Path, int] = field(default_factory=dict)
    repeated: list[tuple[Path, int]] = field(default_factory=list)  # keys given twice, with the later line

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
