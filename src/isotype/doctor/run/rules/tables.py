"""Recognises a dtype for which a table of the program has no entry."""

from __future__ import annotations

import ast
from collections.abc import Mapping

import torch

from ....dtypes import format_dtype
from ....finding import Finding
from ..checks import find_dtype_owner
from ..evidence import Evidence, read_missing_dtype
from ..expressions import read_value
from .findings import make_finding
from .operands import add_brackets, find_tensor_producer


def find_missing_table_entry(evidence: Evidence) -> Finding | None:
    """Finds a KeyError of `TABLE[x.dtype]`, where the table has entries for other dtypes."""
    dtype = read_missing_dtype(evidence.error)
    frame = evidence.failing_frame
    lookup = frame.expression
    if dtype is None or not isinstance(lookup, ast.Subscript):
        return None
    table = read_value(lookup.value, frame)
    if not isinstance(table, Mapping):
        return None
    supported = [key for key in table if isinstance(key, torch.dtype)]
    owner = find_dtype_owner(lookup.slice, evidence.frames)
    source = source_at = origin = ""
    if owner is not None:
        producer = find_tensor_producer(evidence, owner[0], owner[1], dtype)
        source, source_at = add_brackets(producer.text), producer.location
        origin = producer.describe(format_dtype(dtype))
    targets = [other for other in supported if _holds_all_values(other, dtype)]
    return make_finding(
        "RN043",
        evidence,
        table=ast.unparse(lookup.value),
        at=frame.location,
        value="" if owner is None else ast.unparse(owner[0]),
        has=format_dtype(dtype),
        dtype=str(dtype),
        supported=", ".join(map(format_dtype, supported)),
        origin=origin,
        source=source,
        source_at=source_at,
        target=str(min(targets, key=lambda other: other.itemsize)) if targets else "",
    )


def _holds_all_values(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether a dtype of the same kind has all values of another one."""
    if torch.bool in (dtype, other) or dtype.is_complex or other.is_complex:
        return False
    if dtype.is_floating_point and other.is_floating_point:
        wide, narrow = torch.finfo(dtype), torch.finfo(other)
        return wide.max >= narrow.max and wide.eps <= narrow.eps
    if dtype.is_floating_point or other.is_floating_point:
        return False
    limits, other_limits = torch.iinfo(dtype), torch.iinfo(other)
    return limits.max >= other_limits.max and limits.min <= other_limits.min
