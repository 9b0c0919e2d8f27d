"""Reads TTIR, the text of a kernel in Triton's first intermediate language, into functions,
operations and their nested blocks.

Offsets can be computed from TTIR, because it contains the width of every integer operation (`i32`
or `i64`) and the source line of every operation. Values that are known when compiling are constants
in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_LOCATION_REFERENCE = re.compile(r" loc\((#loc\d*)\)")
_NAMED_LOCATION = re.compile(r' loc\("(\w+)"\(#loc\d*\)\)')
_LOCATION_LINE = re.compile(r"^(#loc\d*) = loc\((.*)\)$")
_FILE_LOCATION = re.compile(r'^"(.*)":(\d+):\d+$')
_REFERENCE = re.compile(r"#loc\d*")
_FUNCTION = re.compile(
    r"^tt\.func .*?@(?P<name>[^(]+)\((?P<parameters>.*?)\)(?: ->| attributes| \{)"
)
_RESULTS = re.compile(r"^(?P<names>%[\w.$-]+(?::\d+)?(?:, %[\w.$-]+(?::\d+)?)*) = (?P<text>.*)$")
_BLOCK_LABEL = re.compile(r"^\^(?P<name>\w+)(?:\((?P<arguments>.*)\))?:")
_VALUE = re.compile(r"%[\w.$-]+(?:#\d+)?")
_OPERATION = re.compile(r'^"?(?P<name>[a-z_]+\.[\w.]+)"?')


@dataclass
class Block:
    """A list of operations. `arguments` are the values that a branch to this block passes.

    label  the name of the block, to which branches refer
    """

    label: str = ""
    arguments: list[str] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)


@dataclass
class Operation:
    """One operation, such as `%2 = arith.muli %0, %1 : i32`.

    text     the operation without its results
    regions  the nested code of a loop or a branch; each region is a list of blocks
    """

    name: str
    results: list[str]
    text: str
    location: str
    regions: list[list[Block]] = field(default_factory=list)

    @property
    def values(self) -> list[str]:
        """Returns the names of all values that the operation's first line mentions, in order."""
        return _VALUE.findall(self.text)

    @property
    def types(self) -> str:
        """Returns the text after the last ` : `, which contains the types."""
        return self.text.rpartition(" : ")[2]


@dataclass
class Function:
    """A function of a module. The first of its blocks is the entry."""

    name: str
    parameters: list[str]
    blocks: list[Block]


@dataclass
class Module:
    """A module with its functions.

    locations  `#loc12` -> file and line
    """

    functions: dict[str, Function]
    locations: dict[str, tuple[str, int]]

    @property
    def kernel(self) -> Function:
        return next(iter(self.functions.values()))


def parse_module(text: str) -> Module:
    """Parses the text of a module with locations, as `str(module)` gives it."""
    functions: dict[str, Function] = {}
    lines = _Lines([line.strip() for line in text.splitlines()])
    for line in lines:
        match = _FUNCTION.match(line)
        if match is not None:
            parameters = _VALUE.findall(match["parameters"])
            blocks, _ = _parse_region(lines)
            name = match["name"].strip('"')
            functions[name] = Function(name, parameters, blocks)
    return Module(functions, _parse_locations(text))


class _Lines:
    """The lines of a module that were not read yet. All functions of the parser read from the same
    object.
    """

    def __init__(self, lines: list[str]) -> None:
        self._lines = iter(lines)

    def __iter__(self) -> Iterator[str]:
        return self._lines


def _parse_region(lines: _Lines) -> tuple[list[Block], str]:
    """Reads the blocks up to the brace that closes the region. Returns the blocks, and the line
    with this brace.
    """
    blocks = [Block()]
    for line in lines:
        if line.startswith("}"):
            return blocks, line
        label = _BLOCK_LABEL.match(line)
        if label is not None:
            arguments = _VALUE.findall(label["arguments"] or "")
            block = Block(label["name"], arguments)
            if blocks == [Block()]:
                blocks = [block]
            else:
                blocks.append(block)
            continue
        operation = _parse_operation(line)
        if operation is None:
            continue
        while line.endswith("{"):
            region, line = _parse_region(lines)
            operation.regions.append(region)
            operation.location = _read_location(line) or operation.location
        blocks[-1].operations.append(operation)
    return blocks, ""


def _parse_operation(line: str) -> Operation | None:
    results = []
    text = line
    match = _RESULTS.match(line)
    if match is not None:
        text = match["text"]
        for name in match["names"].split(", "):
            base, _, count = name.partition(":")
            if count:
                results += [f"{base}#{index}" for index in range(int(count))]
            else:
                results.append(base)
    operation = _OPERATION.match(text)
    if operation is None:
        return None
    location = _read_location(text)
    text = _LOCATION_REFERENCE.sub("", _NAMED_LOCATION.sub("", text))
    return Operation(operation["name"], results, text, location)


def _read_location(line: str) -> str:
    references = _LOCATION_REFERENCE.findall(line)
    return references[-1] if references else ""


def _parse_locations(text: str) -> dict[str, tuple[str, int]]:
    """Returns the file and line of each location. A location may refer to another location. The
    location of a call refers to two lines: the called line and the line of the call. The called
    line is used.
    """
    definitions = {}
    for line in text.splitlines():
        match = _LOCATION_LINE.match(line)
        if match is not None:
            definitions[match[1]] = match[2]
    locations: dict[str, tuple[str, int]] = {}
    for reference in definitions:
        definition = definitions[reference]
        for _ in range(8):
            match = _FILE_LOCATION.match(definition)
            if match is not None:
                locations[reference] = match[1], int(match[2])
                break
            inner = _REFERENCE.search(definition)
            if inner is None:
                break
            definition = definitions.get(inner[0], "")
    return locations
