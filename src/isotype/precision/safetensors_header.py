"""Reads the header of a safetensors file: the dtype, the shape and the position of each tensor. The
values are not read. Imports no torch.

Source  the format's description in the README of safetensors
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

MAX_HEADER_BYTES = 100 << 20  # the limit of the library safetensors
_METADATA = "__metadata__"
# name of a dtype in the file -> (Isotype's name, bits per number)
_DTYPES = {
    "F64": ("fp64", 64), "F32": ("fp32", 32), "F16": ("fp16", 16), "BF16": ("bf16", 16),
    "F8_E4M3": ("fp8_e4m3", 8), "F8_E5M2": ("fp8_e5m2", 8), "F8_E8M0": ("fp8_e8m0", 8), "F4": ("fp4", 4),
    "F6_E2M3": ("fp6_e2m3", 6), "F6_E3M2": ("fp6_e3m2", 6),
    "I64": ("int64", 64), "I32": ("int32", 32), "I16": ("int16", 16), "I8": ("int8", 8),
    "U64": ("uint64", 64), "U32": ("uint32", 32), "U16": ("uint16", 16), "U8": ("uint8", 8),
    "BOOL": ("bool", 8), "C64": ("complex64", 64),
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file.

    dtype   its name in the file, such as `BF16`
    offset  the position of its first byte in the file
    size    the number of its bytes
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int

    @property
    def dtype_name(self) -> str:
        """Returns Isotype's name of the dtype; the file's own name if Isotype has none."""
        return _DTYPES.get(self.dtype, (self.dtype,))[0]


@dataclass(frozen=True)
class Header:
    """The tensors of a file by their names, and the texts that its writer added."""

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


def read_safetensors_header(path: Path) -> Header:
    """Reads a header. The file may be shorter than its header says; `check_positions` finds that.

    Raises  ValueError for a file without a header, and for a tensor without a dtype, a shape or a
            position
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= MAX_HEADER_BYTES:
            raise ValueError("it has no safetensors header")
        text = file.read(size)
    if len(text) < size:
        raise ValueError("its header is cut")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("its header is not JSON") from None
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    metadata = header.pop(_METADATA, None)
    tensors = {name: _read_entry(name, entry, 8 + size) for name, entry in header.items()}
    texts = metadata.items() if isinstance(metadata, dict) else ()
    return Header(tensors, {str(key): str(value) for key, value in texts})


def _read_entry(name: str, entry: Any, start: int) -> TensorEntry:
    values = entry if isinstance(entry, dict) else {}
    dtype = values.get("dtype")
    shape = values.get("shape")
    offsets = values.get("data_offsets")
    if not isinstance(dtype, str) or not _is_numbers(shape) or not _is_numbers(offsets):
        raise ValueError(f"its header has no dtype, shape and position for {name[:80]!r}")
    if not dtype:
        raise ValueError(f"its header has an empty dtype for {name[:80]!r}")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"its header has no first and last byte for {name[:80]!r}")
    first, last = offsets
    return TensorEntry(dtype, tuple(shape), start + first, last - first)


def _is_numbers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def check_positions(path: Path, entries: Iterable[tuple[str, TensorEntry]]) -> None:
    """Raises ValueError if a tensor would end after the end of the file, or if its number of bytes
    does not fit its shape.
    """
    file_size = path.stat().st_size
    for name, entry in entries:
        if entry.offset + entry.size > file_size:
            raise ValueError(f"the file is cut: {name[:80]!r} ends after the file does")
        bits = _DTYPES.get(entry.dtype, ("", 0))[1]
        if bits and entry.size != prod(entry.shape) * bits // 8:
            shape = list(entry.shape)
            raise ValueError(
                f"{name[:80]!r} has {entry.size} bytes, and its shape {shape} in {entry.dtype} needs"
                f" {prod(entry.shape) * bits // 8}"
            )
