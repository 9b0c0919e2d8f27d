"""The dtypes of a checkpoint from its safetensors header: only the header is read."""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from pathlib import Path

LARGEST_HEADER = 100 << 20


class BadHeader(ValueError):
    pass


def read(path: Path) -> Counter[str]:
    """dtype word of the file (`BF16`, `F32`, `U8`) -> number of elements. Raises BadHeader."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= LARGEST_HEADER:
            raise BadHeader("no safetensors header")
        text = file.read(size)
    try:
        header = json.loads(text)
    except ValueError as error:
        raise BadHeader("the safetensors header is not JSON") from error
    count: Counter[str] = Counter()
    for name, tensor in header.items():
        if name != "__metadata__" and isinstance(tensor, dict) and "dtype" in tensor:
            count[tensor["dtype"]] += prod(tensor.get("shape", []))
    return count
