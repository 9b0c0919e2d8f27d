"""Finds the expression of a row's item, if a DataLoader reads its rows from a list, or from a table of
the package `datasets`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..arguments import find_argument, list_parameters
from ..bindings import find_earlier_bindings, iterate_returned_values, walk_scope
from ..expressions import UNKNOWN, is_tensor, node_keyword, read_function, read_value
from ..frames import make_module_frame, make_returned_frame
from ..producer import Producer
from .functions import read_arguments
from .search import Search

_MAX_STEPS = 8  # names and functions through which a list of rows is followed
_LIST_FUNCTIONS = ("list", "tuple", "sorted", "reversed")
_FLOAT_REASON = "a DataLoader makes fp64 tensors of Python's floats"


@dataclass(frozen=True, slots=True)
class RowSource:
    """The rows that a DataLoader reads.

    rows   the list, the dataset of the package `datasets`, or UNKNOWN if no variable holds them
    node   the expression of the rows in the call that made the DataLoader
    index  the index of the frame that contains the expression
    """

    rows: Any
    node: ast.expr
    index: int


def find_row_source(search: Search, call: ast.Call, index: int, loader: Any) -> RowSource | None:
    """Returns the rows of a DataLoader that a call made, if no class of the user's code makes them.

    loader  the DataLoader, or UNKNOWN if no variable holds it
    """
    frame = search.frames[index]
    node = node_keyword(call, "dataset") or next(iter(call.args), None)
    if node is None or read_function(call.func, frame) is not torch.utils.data.DataLoader:
        return None
    is_loader = isinstance(loader, torch.utils.data.DataLoader)
    rows = loader.dataset if is_loader else read_value(node, frame)
    is_table = type(rows).__module__.startswith("datasets.")
    is_list = rows is UNKNOWN or type(rows) in (list, tuple)
    return RowSource(rows, node, index) if is_table or is_list else None


def follow_rows(search: Search, source: RowSource, key: Any) -> Producer | None:
    """Continues a search at the item `key` of the rows. The item of the first row, or the source code
    if no variable holds the rows, must show that it has the dtype.
    """
    if source.rows is not UNKNOWN and type(source.rows) not in (list, tuple):
        return _follow_table(search, source, key)
    item = _read_item(source.rows, key)
    is_float = isinstance(item, float) and search.dtype == torch.float64
    is_known = isinstance(item, torch.Tensor) and item.dtype == search.dtype
    if item is not UNKNOWN and not is_known and not is_float:
        return None
    for row, index, line in _iterate_rows(search, source.node, source.index, _MAX_STEPS):
        node = _find_item(row, key)
        value: Any = UNKNOWN if node is None else read_value(node, search.frames[index])
        if node is None or (is_tensor(value) and value.dtype != search.dtype):
            continue
        search.key = UNKNOWN
        result = search.follow(node, index, line)
        if is_float:
            result = replace(search.producer("data", node, index), reason=_FLOAT_REASON)
        elif is_known and not result.is_proven:
            result = search.producer("data", node, index)
        return replace(result, is_proven=is_known or is_float or result.is_proven)
    return None


def _read_item(rows: Any, key: Any) -> Any:
    try:
        return rows[0][key]
    except (IndexError, KeyError, TypeError):
        return UNKNOWN


def _iterate_rows(
    search: Search, node: ast.AST, index: int, steps: int
) -> Iterator[tuple[ast.AST, int, int]]:
    """Yields the expressions of a row in the code that made a list of rows, each with the index of its
    frame and its line.
    """
    line = getattr(node, "lineno", search.frames[index].line)
    if steps == 0:
        return
    match node:
        case ast.ListComp(part) | ast.GeneratorExp(part):
            yield part, index, part.lineno
        case ast.List(parts) | ast.Tuple(parts):
            yield from ((part, index, part.lineno) for part in parts[:1])
        case ast.Subscript(rows, ast.Slice()):
            yield from _iterate_rows(search, rows, index, steps - 1)
        case ast.Call(ast.Name(name), [rows, *_]) if name in _LIST_FUNCTIONS:
            yield from _iterate_rows(search, rows, index, steps - 1)
        case ast.Call(ast.Name("zip"), columns):
            yield ast.Tuple([_make_element(column) for column in columns]), index, line
        case ast.Name(name):
            for value, value_index in iterate_list_values(search, name, index, line):
                if isinstance(value, ast.Call) and _is_append(value):
                    yield value.args[0], value_index, value.lineno
                else:
                    yield from _iterate_rows(search, value, value_index, steps - 1)
        case ast.Call(function):
            called = read_function(function, search.frames[index])
            for value, value_index in iterate_results(search, called, node, index, line):
                yield from _iterate_rows(search, value, value_index, steps - 1)


def _make_element(column: ast.expr) -> ast.expr:
    element = ast.Subscript(column, ast.Constant(0), ast.Load())
    return ast.copy_location(element, column)


def _is_append(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "append"


def _find_item(row: ast.AST, key: Any) -> ast.expr | None:
    """Returns the expression of an item in that of a row: a dict or a tuple."""
    match row:
        case ast.Dict(keys, values):
            for name, value in zip(keys, values):
                if isinstance(name, ast.Constant) and name.value == key:
                    return value
        case ast.Tuple(values) | ast.List(values):
            if isinstance(key, int) and key < len(values):
                return values[key]
        case ast.Call(ast.Name("dict")) as call if isinstance(key, str):
            return node_keyword(call, key)
    return None


def _follow_table(search: Search, source: RowSource, key: Any) -> Producer | None:
    """Returns the call that made a dataset return tensors, or the rows of a dataset whose floats a
    DataLoader makes tensors.
    """
    stored = vars(source.rows)
    name, options = stored.get("_format_type"), stored.get("_format_kwargs") or {}
    if name == "torch" and search.dtype == options.get("dtype", torch.float32):
        calls = list(iterate_calls(search, ("with_format", "set_format")))
        if len(calls) != 1:
            return None
        reason = "a dataset in the format torch makes fp32 tensors of all floats"
        if "dtype" in options:
            reason = "it sets this dtype for the floats of the dataset"
        call, index = calls[0]
        return replace(search.producer("call", call, index, is_proven=True), reason=reason)
    feature = getattr(source.rows, "features", {}).get(key)
    is_float = str(getattr(feature, "dtype", "")).startswith("float")
    if name is None and is_float and search.dtype == torch.float64:
        result = search.producer("data", source.node, source.index, is_proven=True)
        return replace(result, reason=_FLOAT_REASON)
    return None


def iterate_list_values(
    search: Search, name: str, index: int, line: int
) -> Iterator[tuple[Any, int]]:
    """Yields the values that a function or module assigns to a name before a line, and the calls
    `NAME.append(row)`, with the index of the frame.
    """
    frame = search.frame_at(index, line)
    scope = frame.scope
    if scope is None:
        return
    for node in walk_scope(scope):
        match node:
            case ast.Call(ast.Attribute(ast.Name(owner), "append"), [_]):
                if owner == name and node.lineno < line:
                    yield node, index
    bindings = find_earlier_bindings(scope, name, line)
    for binding in bindings:
        if isinstance(binding, ast.Assign) and not search.is_skipped(binding, scope, index):
            yield binding.value, index
    if not bindings and not isinstance(scope, ast.Module):
        if name in list_parameters(scope):
            outer, call, _ = search.find_caller(index)
            argument = None if outer < 0 else find_argument(scope, call, name, True)
            if argument is not None:
                yield argument, outer
            return
        module_frame = make_module_frame(frame)
        if module_frame is not None:
            search.frames.append(module_frame)
            yield from iterate_list_values(search, name, len(search.frames) - 1, module_frame.line)


def iterate_results(
    search: Search, function: Any, call: ast.Call, index: int, line: int
) -> Iterator[tuple[ast.expr, int]]:
    """Yields the expressions that a function of the user's code returned, with the index of a
    frame for it.
    """
    frame = make_returned_frame(function, read_arguments(search, function, call, index, line))
    if frame is None:
        return
    new_index = len(search.frames)
    search.frames.append(frame)
    search.callers[new_index] = (index, call, line)
    for value in list(iterate_returned_values(frame.scope)):
        yield value, new_index


def iterate_calls(search: Search, names: Sequence[str]) -> Iterator[tuple[ast.Call, int]]:
    """Yields the calls of the user's files to methods of these names, with the index of a frame
    for the module.
    """
    for name in names:
        for source, call in search.program.list_calls(name):
            if isinstance(call.func, ast.Attribute):
                search.frames.append(source.frame)
                yield call, len(search.frames) - 1
