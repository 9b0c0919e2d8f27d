"""Continues the search in a tuple, list or dict from which a tensor was read."""

from __future__ import annotations

import ast

from ..bindings import find_stored_item
from ..casts import find_cast
from ..expressions import read_condition, read_value
from ..producer import Producer
from ..program_source import Comprehension
from .comprehensions import follow_part
from .functions import follow_item
from .items import follow_item_functions
from .search import Search
from .stored import follow_item_writes


def follow_container_item(search: Search, node: ast.Subscript, index: int, line: int) -> Producer:
    """Continues the search in the container of an item."""
    frame = search.frame_at(index, line)
    search.key = read_value(node.slice, frame)
    stored = find_stored_item(frame.scope, node, line)
    if stored is not None:
        return search.follow(stored, index, stored.lineno)
    key = search.key
    container = read_value(node.value, frame)
    result = search.follow(node.value, index, line)
    if result.is_proven or not isinstance(key, str) or not isinstance(container, dict):
        return result
    return follow_item_writes(search, key, container, node, index) or result


def follow_container(search: Search, node: ast.AST, index: int, line: int) -> Producer:
    """Continues the search in a dict or list that is written in the source code."""
    frame = search.frame_at(index, line)
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values):
            if key is not None and read_value(key, frame) == search.key:
                return follow_item(search, value, index, line)
        return search.producer("data", node, index)
    assert isinstance(node, Comprehension)
    part = node.value if isinstance(node, ast.DictComp) else node.elt
    cast = find_cast(part, frame, search.dtype)
    if cast is not None:
        return search.producer("cast", cast, index, is_proven=True)
    row_result = follow_row(search, part, index, line)
    if row_result is not None:
        return row_result
    result = follow_part(search, node, part, index, line)
    return result if result.is_proven else search.producer("data", node, index)


def follow_row(search: Search, part: ast.AST, index: int, line: int) -> Producer | None:
    """If a collator reads `row[key]` of each row, continues the search in the dataset, which
    made the rows.
    """
    if index not in search.item_frames:
        return None
    for node in ast.walk(part):
        match node:
            case ast.Subscript(ast.Name(), ast.Constant(key)):
                functions = search.inner_functions
                element = None
                if isinstance(key, int):
                    element = key
                search.key = key
                return follow_item_functions(search, functions, element, index, line)
    return None


def follow_choice(search: Search, node: ast.IfExp, index: int, line: int) -> Producer:
    """Continues the search in the part of `X if CONDITION else Y` that was evaluated. If the
    condition cannot be read, continues in both.
    """
    holds = read_condition(node.test, search.frame_at(index, line))
    parts = [node.body, node.orelse]
    if holds is not None:
        parts = parts[:1] if holds else parts[1:]
    results = [search.follow(part, index, line) for part in parts]
    return next((result for result in results if result.is_proven), results[0])
