"""Describes what an array of NumPy holds whose dtype PyTorch does not have, and the columns of the
pandas table from which it was made.
"""

from __future__ import annotations

import ast
import numbers
from dataclasses import dataclass
from decimal import Decimal
from types import ModuleType
from typing import Any

import numpy as np

from .expressions import UNKNOWN, read_function, read_value
from .frames import CallFrame

_MAX_NAMES = 3  # columns of one dtype that a sentence names
_MAX_REPR = 30  # characters of a text that a sentence quotes


@dataclass(frozen=True, slots=True)
class ArrayContents:
    """What an array holds.

    kind      `numbers` (also bools), `missing` (numbers and None or NA), `rows` (arrays or lists of
              one length), `ragged` (of several lengths), `time`, `other` (objects such as texts), or
              `dtype` (numbers of a dtype that PyTorch does not have)
    element   the first object that is no number, as text; "" if there is none
    position  the number of this object among the elements
    """

    kind: str
    element: str = ""
    position: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TableSource:
    """The table or the column of pandas from which an expression made an array.

    text   the source code of the table
    table  the DataFrame or the Series
    """

    text: str
    table: Any

    @property
    def columns(self) -> list[tuple[str, str]]:
        """The name and the dtype of each column."""
        if type(self.table).__name__ == "Series":
            return [(str(self.table.name), str(self.table.dtype))]
        return [(str(name), str(dtype)) for name, dtype in self.table.dtypes.items()]

    def describe_columns(self) -> str:
        """Returns the dtypes of the columns, with the names of a few columns of each."""
        groups: dict[str, list[str]] = {}
        for column, dtype in self.columns:
            groups.setdefault(dtype, []).append(column)
        return ", ".join(f"{dtype} ({_join_names(names)})" for dtype, names in groups.items())

    def find_column(self, position: int) -> str:
        """Returns the name of the column of the element with a number in the array."""
        columns = self.columns
        return columns[position % len(columns)][0]


def _join_names(names: list[str]) -> str:
    if len(names) <= _MAX_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[: _MAX_NAMES - 1])} and {len(names) - _MAX_NAMES + 1} others"


def read_contents(array: np.ndarray[Any, Any]) -> ArrayContents:
    """Reads the elements of an array of objects, up to the first one that decides its kind."""
    if array.dtype.kind in "mM":
        return ArrayContents("time")
    if array.dtype.kind in "US":
        return ArrayContents("other", _describe_element(array.flat[0]) if array.size else "")
    if array.dtype != object:
        return ArrayContents("dtype")
    missing = None
    for position, element in enumerate(array.flat):
        if isinstance(element, (numbers.Real, Decimal, np.number, np.bool_)):
            continue
        if element is None or type(element).__name__ in ("NAType", "NaTType"):
            missing = missing or ArrayContents("missing", str(element), position)
            continue
        if isinstance(element, (np.ndarray, list, tuple)):
            lengths = {len(row) for row in array.flat if isinstance(row, (np.ndarray, list, tuple))}
            kind = "rows" if len(lengths) == 1 else "ragged"
            return ArrayContents(kind, _describe_element(element), position)
        return ArrayContents("other", _describe_element(element), position)
    return missing or ArrayContents("numbers")


def _describe_element(element: Any) -> str:
    name = type(element).__name__
    if isinstance(element, str):
        return f"{str(element)[:_MAX_REPR]!r} (str)"
    article = "an" if name[0].lower() in "aeiou" or name == "ndarray" else "a"
    return f"{article} {name}"


def find_table(node: ast.AST, frame: CallFrame) -> TableSource | None:
    """Returns the table of which an expression such as `df[names].values` makes an array."""
    owner = _find_owner(node, frame)
    table = None if owner is None else _read_table(owner, frame)
    if owner is None or table is None or not table.size:
        return None
    return TableSource(ast.unparse(owner), table)


def _find_owner(node: ast.AST, frame: CallFrame) -> ast.expr | None:
    """Returns the expression of the table in `TABLE.values`, `TABLE.to_numpy()` and
    `np.array(TABLE)`.
    """
    match node:
        case ast.Attribute(owner, "values"):
            return owner
        case ast.Call(ast.Attribute(owner, "to_numpy")):
            return owner
        case ast.Call(function, [owner, *_]):
            called = read_function(function, frame)
            if called is np.array or called is np.asarray:
                return owner
    return None


def _read_table(node: ast.expr, frame: CallFrame) -> Any:
    """Returns the table, or its columns or column, that an expression names; None for others."""
    value = read_value(node, frame)
    if _is_of_pandas(value, "DataFrame", "Series"):
        return value
    owner: ast.expr | None = None
    names: Any = UNKNOWN
    match node:
        case ast.Subscript(owner, index):
            names = read_value(index, frame)
        case ast.Attribute(owner, names):  # `df.Survived`
            pass
    table: Any = UNKNOWN if owner is None else read_value(owner, frame)
    if not _is_of_pandas(table, "DataFrame") or not isinstance(names, (str, list)):
        return None
    wanted = [names] if isinstance(names, str) else names
    return table[names] if all(name in table.columns for name in wanted) else None


def _is_of_pandas(value: Any, *names: str) -> bool:
    kind = type(value)
    return kind.__name__ in names and kind.__module__.partition(".")[0] == "pandas"


def find_array_expression(frame: CallFrame) -> ast.expr | None:
    """Returns the data that a call such as `torch.tensor(data)` converts to a tensor."""
    match frame.expression:
        case ast.Call(function, [data, *_]) if isinstance(_read_owner(function, frame), ModuleType):
            return data
        case ast.Call(function, [], [ast.keyword("data", data), *_]):
            return data
    return None


def _read_owner(function: ast.expr, frame: CallFrame) -> Any:
    return read_value(function.value, frame) if isinstance(function, ast.Attribute) else UNKNOWN
