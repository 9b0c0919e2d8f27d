"""YAML with the line of every key; plain words resolved as YAML 1.1 does (PyYAML, as the trainers): an unquoted `no` is False."""

from __future__ import annotations

import re
import warnings
from typing import Any

from .tree import Path, Tree

_BOOL = {w: w in ("yes", "true", "on") for w in ("yes", "no", "true", "false", "on", "off")}
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$")
_FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?$|^[-+]?\.[0-9_]+(?:[eE][-+]?[0-9]+)?$")


MOST_VALUES = 200_000


class BadYaml(ValueError):
    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


def read(text: str) -> Tree:
    """The first document of a file. Raises BadYaml."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        with warnings.catch_warnings(action="ignore"):  # an anchor may be given again
            root = next(iter(YAML(typ="safe", pure=True).compose_all(text)), None)
    except MarkedYAMLError as error:
        raise BadYaml(str(error.problem or error), (error.problem_mark.line + 1) if error.problem_mark else 1) from error
    except (YAMLError, ValueError, RecursionError) as error:
        raise BadYaml(str(error).splitlines()[0], 1) from error
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
        raise BadYaml("nested too deeply", node.start_mark.line + 1)
    if len(tree.lines) > MOST_VALUES:  # aliases of aliases grow without end
        raise BadYaml(f"more than {MOST_VALUES} values", node.start_mark.line + 1)
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
            if key in result:
                tree.repeated.append(((*path, key), key_node.start_mark.line + 1))
            result[key] = _value(value_node, (*path, key), tree, depth + 1)
        return {**merged, **result}
    if node.id == "sequence":
        return [_value(item, (*path, i), tree, depth + 1) for i, item in enumerate(node.value)]
    return scalar(node.value) if node.style in (None, "") else node.value
