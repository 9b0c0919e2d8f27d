"""The header of a cache entry: safetensors' own, 8 bytes of length and JSON padded to 8. Any safetensors reader opens the file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np

from .tokens import COLUMNS

_NAMES = {"int32": "I32", "int64": "I64", "uint64": "U64", "bool": "BOOL"}
_MOST = 100 << 20  # bytes of a header; safetensors' own limit


def header_bytes(order: Sequence[str], sizes: Mapping[str, int], facts: str, digest: str) -> bytes:
    at = 0
    header: dict[str, Any] = {"__metadata__": {"facts": facts, "sha256": digest}}
    for name in order:
        width = np.dtype(COLUMNS[name]).itemsize
        header[name] = {"dtype": _NAMES[COLUMNS[name]], "shape": [sizes[name] // width], "data_offsets": [at, at + sizes[name]]}
        at += sizes[name]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(file: IO[bytes], size: int) -> tuple[dict[str, tuple[int, int]], str, str, int]:
    """Where each column lies, the facts, the checksum, and where the data begin. Raises ValueError where these cannot be."""
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(_MOST, size - 8):
        raise ValueError("cut short, or no safetensors file")
    header = json.loads(file.read(length))
    begin = 8 + length
    places = {}
    for name, dtype in COLUMNS.items():
        entry = header[name]
        start, end = entry["data_offsets"]
        width = np.dtype(dtype).itemsize
        whole = entry["dtype"] == _NAMES[dtype] and entry["shape"] == [(end - start) // width] and (end - start) % width == 0
        if not (whole and 0 <= start <= end <= size - begin):
            raise ValueError(f"cut short, or not as it was written ({name})")
        places[name] = (start, end)
    if max(end for _, end in places.values()) != size - begin:
        raise ValueError("cut short, or longer than it was written")
    metadata = header["__metadata__"]
    return places, metadata["facts"], metadata["sha256"], begin
