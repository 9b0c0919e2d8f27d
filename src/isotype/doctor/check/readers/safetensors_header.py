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
    except (ValueError, RecursionError) as error:
        raise BadHeader("the safetensors header is not JSON") from error
    if not isinstance(header, dict):
        raise BadHeader("the safetensors header is not an object")
    count: Counter[str] = Counter()
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = (tensor.get("dtype"), tensor.get("shape")) if isinstance(tensor, dict) else (None, None)
        if not isinstance(dtype, str) or not isinstance(shape, list) or not all(isinstance(n, int) for n in shape):
            raise BadHeader(f"the safetensors header has no dtype and shape for {name[:80]!r}")
        count[dtype] += prod(shape)
    return count
