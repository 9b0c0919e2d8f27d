"""Continues the search in the functions that make the items of a loop: a generator, a collator, or a
dataset.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import FunctionType, MethodType
from typing import Any

import torch

from ..arguments import iterate_arguments
from ..bindings import (
    find_assigned_call,
    find_iterated_table,
    find_position,
    resolve_iteration,
    unwrap_iterable,
)
from ..expressions import UNKNOWN, node_keyword, read_function, read_value
from ..frames import CallFrame
from ..producer import Producer
from .attributes import find_constructors
from .functions import follow_returned, resolve_function
from .rows import RowSource, find_row_source, follow_rows
from .search import Search


def follow_collators(search: Search) -> Producer | None:
    """Searches the collators and datasets of trainers and DataLoaders in the frames. A trainer
    reads the batch in a function that has returned, so no assignment leads to the collator.
    """
    for index in range(search.running_count):
        frame = search.frames[index]
        stored = getattr(frame.variables.get("self"), "__dict__", {})
        functions = [stored.get("data_collator")]
        for value in (*frame.variables.values(), *stored.values()):
            if isinstance(value, torch.utils.data.DataLoader):
                functions += list(iterate_item_functions(value))
                calls = list(find_loader_calls(search, value, index))
                functions += find_row_sources(search, value, calls)
        if functions[0] is not None:
            functions += list(iterate_item_functions(stored.get("train_dataset")))
        result = follow_item_functions(search, functions, None, index, frame.line)
        if result is not None:
            return replace(result, passed="", passed_at="")
    return None


def follow_loop(
    search: Search,
    binding: Any,
    name: str,
    index: int,
    item: Any = UNKNOWN,
    position: int | None = None,
) -> Producer:
    """Continues the search at the values over which a `for` loop iterates.

    item      the running item of the loop; None if the loop has ended. By default, the value of the
              variable
    position  the position of the item among the values, if it is known
    """
    iterable, target = resolve_iteration(binding.iter, binding.target, name)
    table = find_iterated_table(iterable)
    if table is not None:
        search.key = UNKNOWN
        stored = search.follow(table, index, binding.lineno)
        return stored if stored.kind != "unknown" else search.producer("data", table, index)
    element = find_position(target, name)
    if element is None and isinstance(iterable, (ast.Name, ast.Attribute, ast.Tuple, ast.List)):
        items = read_value(iterable, search.frame_at(index, binding.lineno))
        if item is UNKNOWN and index < search.running_count:
            item = search.frames[index].variables.get(name)
        if position is not None:
            search.key = position
        elif isinstance(item, torch.Tensor):  # in other items, the key leads to the tensor
            search.key = find_item_position(items, item)
    result = follow_items(search, iterable, element, index, binding.lineno)
    return result or search.producer("data", binding.iter, index)


def find_item_position(items: Any, item: torch.Tensor) -> Any:
    """Returns the only position of a tensor in a list or tuple, or UNKNOWN."""
    if not isinstance(items, (list, tuple)):
        return UNKNOWN
    positions = [number for number, other in enumerate(items) if other is item]
    return positions[0] if len(positions) == 1 else UNKNOWN


def follow_next_item(search: Search, node: ast.Call, index: int, line: int) -> Producer | None:
    """Continues the search at the iterable of `next(iterator)`."""
    iterable = unwrap_iterable(node.args[0])
    if isinstance(iterable, ast.Name) and iterable is node.args[0]:
        call = find_assigned_call(iterable, replace(search.frames[index], line=line))
        iterable = iterable if call is None else unwrap_iterable(call)
    element = search.element
    search.element = None
    return follow_items(search, iterable, element, index, line)


def follow_items(
    search: Search, iterable: ast.AST, element: int | None, index: int, line: int
) -> Producer | None:
    """Continues the search in the functions that make the items of an iterable: a generator, a
    collator, or the `__getitem__` of a dataset.
    """
    frame = search.frame_at(index, line)
    value = read_value(iterable, frame)
    functions = list(iterate_item_functions(value))
    calls = [(iterable, index)] if isinstance(iterable, ast.Call) else []
    if isinstance(value, torch.utils.data.DataLoader):
        calls += list(find_loader_calls(search, value, index))
    for call, call_index in calls:
        function = read_function(call.func, search.frames[call_index])
        if isinstance(function, FunctionType):  # a generator
            search.element = element
            result = follow_returned(search, function, call, index, line)
            if result is not None:
                return result
        result = follow_tensor_dataset(search, call, element, call_index)
        if result is not None:
            return result
        functions += list(iterate_item_functions_of_call(call, search.frames[call_index]))
    functions += find_row_sources(search, value, calls)
    result = follow_item_functions(search, functions, element, index, line)
    is_plain = isinstance(iterable, (ast.Name, ast.Attribute, ast.Tuple, ast.List))
    if result is None and is_plain and not functions:
        if element is not None:
            search.key = element
        plain = search.follow(iterable, index, line)
        return plain if plain.is_proven else None
    return result


def follow_item_functions(
    search: Search, functions: Sequence[Any], element: int | None, index: int, line: int
) -> Producer | None:
    """Continues the search at the values that a collator or a dataset returns. The first
    functions return what the later ones made.
    """
    for number, function in enumerate(functions):
        search.element = element
        search.inner_functions = functions[number + 1 :]
        if isinstance(function, RowSource):
            key = search.key if element is None else element
            result = follow_rows(search, function, key)
        else:
            result = follow_returned(search, function, None, index, line, is_item=True)
        if result is not None and result.is_proven:
            return result
    search.element = None
    return None


def find_loader_calls(search: Search, loader: object, index: int) -> Iterator[tuple[ast.Call, int]]:
    """Yields the calls that made a DataLoader: those of a frame, or else those of the frames
    around it.
    """
    for number in range(min(index, search.running_count - 1), -1, -1):
        calls = []
        if search.frames[number].is_user_code:
            calls = list(find_constructors(search, loader, number))
        yield from calls
        if calls:
            return


def find_row_sources(
    search: Search, loader: object, calls: Sequence[tuple[ast.Call, int]]
) -> list[RowSource]:
    """Returns the rows that a DataLoader reads. `calls` made the DataLoader."""
    sources = [find_row_source(search, call, index, loader) for call, index in calls]
    return [source for source in sources if source is not None]


def follow_tensor_dataset(
    search: Search, call: ast.Call, element: int | None, index: int
) -> Producer | None:
    """Continues the search at the tensor that was passed to a `TensorDataset`. `call` made the
    dataset, or a DataLoader for it.
    """
    frame = search.frames[index]
    if element is None:
        return None
    if read_function(call.func, frame) is torch.utils.data.TensorDataset:
        if element < len(call.args):
            return search.follow(call.args[element], index, call.lineno)
        return None
    for part in iterate_arguments(call):
        if isinstance(part, ast.Call):
            return follow_tensor_dataset(search, part, element, index)
        value = read_value(part, frame)
        if isinstance(value, torch.utils.data.TensorDataset):
            for inner, inner_index in find_constructors(search, value, index):
                return follow_tensor_dataset(search, inner, element, inner_index)
    return None


def iterate_item_functions(value: Any) -> Iterator[Any]:
    """Yields the functions that make the items of a DataLoader or dataset. A class of the user's
    code stands for its objects.
    """
    if isinstance(value, torch.utils.data.DataLoader):
        yield value.collate_fn
        value = value.dataset
    while isinstance(value, torch.utils.data.Subset):
        value = value.dataset
    for name in ("__getitem__", "__iter__"):
        if isinstance(value, type):
            yield getattr(value, name, None)
        else:
            method = getattr(type(value), name, None)
            if isinstance(method, FunctionType):
                yield MethodType(method, value)


def iterate_item_functions_of_call(call: ast.Call, frame: CallFrame) -> Iterator[Any]:
    """Yields the functions that make the items of the DataLoader that a call created. The arguments
    of the call may create its dataset.
    """
    collator = node_keyword(call, "collate_fn")
    if collator is not None:
        yield resolve_function(read_function(collator, frame))
    for part in iterate_arguments(call):
        if part is collator:
            continue
        if isinstance(part, ast.Call):  # as in `DataLoader(Table(path))`
            value = read_function(part.func, frame)
            if isinstance(value, type):
                yield from iterate_item_functions(value)
        elif isinstance(part, (ast.Name, ast.Attribute)):
            yield from iterate_item_functions(read_value(part, frame))
