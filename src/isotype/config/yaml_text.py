"""Reads and writes YAML. Reading keeps the line of each key; a written value is the same when it is
read again. Imports no torch.

YAML 1.2 is used: `1e-4` is a number, `no` and `on` are text. The reader uses ruamel's node tree,
because only the tree has line numbers and shows duplicate keys.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode
from ruamel.yaml.scanner import Scanner

MAX_DEPTH = 32  # levels of nested values that are read
_TOO_DEEP = "nested too deep, or an anchor that contains itself"
MAX_VALUES = 10_000  # largest number of values of a key; with anchors, ten lines can mean billions


class YamlError(ValueError):
    """The error for invalid YAML. It has a message of one line, and the number of the faulty line
    (counted from 1), or None if the line is not known.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class Entry:
    """One key of a mapping: its name, its value, and its line number. The value is None for a key
    of the top level that holds a mapping.
    """

    key: str
    value: Any
    line: int


class _BoundedScanner(Scanner):
    """Refuses brackets that are nested too deep as soon as it reads them. ruamel's own scanner
    needed 4 s for a file of 100,000 brackets, and then raised a RecursionError.
    """

    def fetch_flow_collection_start(self, TokenClass: Any, to_push: str) -> None:
        # a whole configuration in brackets has two levels around a value
        if len(self.flow_context) > MAX_DEPTH + 2:
            raise YamlError(_TOO_DEEP, self.reader.get_mark().line + 1)
        super().fetch_flow_collection_start(TokenClass, to_push)


class PlainYAML(YAML):
    """A safe YAML reader without ruamel's plug-ins.

    ruamel searches its folder for plug-ins each time a reader is created. That took half of the
    time in which the `resolved.yaml` of a run was read.
    """

    def __init__(self) -> None:
        super().__init__(typ="safe", pure=True)
        self.Scanner = _BoundedScanner

    def official_plug_ins(self) -> list[str]:
        return []


def read_sections(text: str) -> Iterator[tuple[Entry, list[Entry] | None]]:
    """Yields each top-level key of a document with the entries of its mapping, or with None if its
    value is not a mapping.

    Duplicate keys are yielded twice, so that the caller's message can name both lines.

    Raises  YamlError
    """
    root = _compose(text)
    if root is None:
        return
    if not isinstance(root, MappingNode):
        raise YamlError("expected sections (model:, data:, train:, ...)", root.start_mark.line + 1)
    for key_node, value_node in root.value:
        entry = Entry(
            _read_key(key_node),
            None if isinstance(value_node, MappingNode) else _read_node(value_node),
            key_node.start_mark.line + 1,
        )
        if isinstance(value_node, MappingNode):
            child_entries = [
                Entry(_read_key(key_node), _read_node(item_node), key_node.start_mark.line + 1)
                for key_node, item_node in value_node.value
            ]
        else:
            child_entries = None
        yield entry, child_entries


def read_value(text: str) -> Any:
    """Reads a YAML value: `1e-4` gives a float, `[a, b]` a list, empty text None. Raises YamlError."""
    node = _compose(text)
    return None if node is None else _read_node(node)


def _compose(text: str) -> Node | None:
    try:
        node: Node | None = PlainYAML().compose(text)
    except YamlError:
        raise
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(
            f"broken YAML: {error.problem or error.context}", mark.line + 1 if mark else None
        ) from None
    except (
        YAMLError,
        ValueError,
        RecursionError,
        IndexError,
        AttributeError,
        TypeError,
        AssertionError,
        KeyError,
    ) as error:
        # for some malformed text ruamel's scanner raises exceptions that are no YAMLError
        raise YamlError(
            f"broken YAML: {next(iter(str(error).splitlines()), type(error).__name__)}"
        ) from None
    return node


def _read_key(node: Node) -> str:
    value = _read_node(node)
    return value if isinstance(value, str) else str(value)


def _read_node(node: Node, depth: int = 0, count: list[int] | None = None) -> Any:
    """Returns the value of a node. `count[0]` is the number of values that were read for the key so
    far.
    """
    line = node.start_mark.line + 1
    count = [0] if count is None else count
    count[0] += 1
    if depth > MAX_DEPTH:
        raise YamlError(_TOO_DEEP, line)
    if count[0] > MAX_VALUES:
        raise YamlError(f"more than {MAX_VALUES:,} values in one key, by anchors or by hand", line)
    if isinstance(node, SequenceNode):
        return [_read_node(child, depth + 1, count) for child in node.value]
    if isinstance(node, MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(_read_node(key_node, depth + 1, count))
            if key in mapping:
                raise YamlError(f"{key} is given twice", key_node.start_mark.line + 1)
            mapping[key] = _read_node(value_node, depth + 1, count)
        return mapping
    try:
        value = PlainYAML().constructor.construct_object(node, deep=True)
    except (YAMLError, ValueError, OverflowError, TypeError, AttributeError, KeyError) as error:
        problem = getattr(error, "problem", None) or next(
            iter(str(error).splitlines()), type(error).__name__
        )
        raise YamlError(f"{node.value!r}: {problem}", line) from None
    # Python represents bytes of a file name that are not UTF-8 as U+DC80 to U+DCFF
    if isinstance(value, str) and any(
        "\ud800" <= character <= "\udfff" and not "\udc80" <= character <= "\udcff"
        for character in value
    ):
        raise YamlError("half of a surrogate pair is not text", line)
    return value


def write_value(value: Any) -> str:
    """Writes a value on one line, in a form that `read_value` reads as the same value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _write_float(value)
    if isinstance(value, int | datetime.date):
        return str(value)
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(
                f"{_write_text(str(k), flow=True)}: {_write_flow(v)}" for k, v in value.items()
            )
            + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_write_flow(item) for item in value) + "]"
    return _write_text(str(value))


def _write_flow(value: Any) -> str:
    if isinstance(value, str):
        return _write_text(value, flow=True)
    return write_value(value)


def _write_float(value: float) -> str:
    if not math.isfinite(value):
        return {math.inf: ".inf", -math.inf: "-.inf"}.get(value, ".nan")
    text = repr(value)
    mantissa, separator, exponent = text.partition("e")
    if (
        separator and "." not in mantissa
    ):  # a YAML 1.1 reader takes 1e-05 as text; 1.0e-05 is a number in both versions
        return f"{mantissa}.0e{exponent}"
    return text


def _write_text(text: str, *, flow: bool = False) -> str:
    is_plain = (
        text.isascii()
        and text.isprintable()
        and not (flow and any(mark in text for mark in ",[]{}:"))
    )
    if (
        is_plain
        and text == text.strip()
        and text[:1] not in "!&*%@`|>'\"?-#"
        and ": " not in text
        and not text.endswith(":")
    ):
        try:
            if read_value(text) == text:
                return text
        except YamlError:
            pass
    return '"' + "".join(_escape(character) for character in text) + '"'


def _escape(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if character.isprintable():
        return character
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    if code < 0x10000:
        return f"\\u{code:04x}"
    return f"\\U{code:08x}"
