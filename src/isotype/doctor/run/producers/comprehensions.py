"""Continues the search at a variable of a comprehension or generator expression: in the items over
which it iterates, or in the function that contains it.
"""

from __future__ import annotations

import ast
from typing import Any

from ..bindings import collect_bound_names
from ..expressions import UNKNOWN
from ..producer import Producer
from ..program_source import Comprehension, read_source_file
from .items import follow_loop
from .search import Search


def follow_comprehension_name(
    search: Search, node: ast.AST, name: str, index: int
) -> Producer | None:
    """Continues the search at a name inside of a comprehension. Returns None for other names. The
    comprehension may have a frame of its own, whose variables are those of the running item.
    """
    frame = search.frames[index]
    source = read_source_file(frame)
    has_own_frame = frame.scope is None
    if source is None:
        return None
    for parent, part in source.iterate_parents(node):
        if isinstance(parent, (ast.stmt, ast.Lambda)):
            break
        if not isinstance(parent, Comprehension):
            continue
        outer = _find_outer_frame(search, parent, index) if has_own_frame else index
        if outer is None:
            return None
        generator = _find_generator(parent, part, node, name)
        if generator is not None:
            item = frame.variables.get(name) if has_own_frame else None
            return follow_generator(search, generator, name, outer, item)
        if has_own_frame:
            return search.follow(node, outer, parent.lineno)
    return None


def follow_generator(
    search: Search, generator: ast.comprehension, name: str, index: int, item: Any
) -> Producer:
    """Continues the search in the items of `for NAME in ITEMS`.

    item  the running item, or None if the comprehension has ended
    """
    loop = ast.For(generator.target, generator.iter, [], [])
    ast.copy_location(loop, generator.iter)
    position = search.positions.get(id(generator))
    return follow_loop(search, loop, name, index, item, position)


def follow_part(
    search: Search, node: Comprehension, part: ast.expr, index: int, line: int
) -> Producer:
    """Continues the search at the expression that makes the items of a comprehension. The wanted
    item comes from the item of the same position, unless conditions leave items out.
    """
    names = {name for generator in node.generators for name in collect_bound_names(generator)}
    hidden = {(index, name) for name in names} - search.hidden_names
    search.hidden_names |= hidden
    first = node.generators[0]
    if isinstance(search.key, int):
        if len(node.generators) == 1 and not first.ifs:
            search.positions[id(first)] = search.key
        search.key = UNKNOWN
    result = search.follow(part, index, line)
    search.positions.pop(id(first), None)
    search.hidden_names -= hidden
    return result


def _find_generator(
    comprehension: Comprehension, part: ast.AST, node: ast.AST, name: str
) -> ast.comprehension | None:
    """Returns the `for` of a comprehension that gives a name its value.

    part  the part of the comprehension that contains the name
    """
    generators = list(comprehension.generators)
    if isinstance(part, ast.comprehension):
        is_in_items = any(child is node for child in ast.walk(part.iter))
        number = generators.index(part)
        generators = generators[:number] if is_in_items else generators[: number + 1]
    for generator in reversed(generators):
        if name in collect_bound_names(generator):
            return generator
    return None


def _find_outer_frame(search: Search, comprehension: ast.AST, index: int) -> int | None:
    """Returns the index of the innermost running frame whose function contains a comprehension."""
    for number in range(min(index, search.running_count) - 1, -1, -1):
        scope = search.frames[number].scope
        if scope is not None and any(part is comprehension for part in ast.walk(scope)):
            return number
    return None
