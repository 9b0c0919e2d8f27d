"""Sizes of memory as people write them: `20GiB`, `1.5 GB`, `800MiB`. Imports no torch."""

from __future__ import annotations

import re

UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}
SIZE = r"^[0-9]+(\.[0-9]+)? ?(GiB|MiB|GB|MB)$"


def bytes_of(size: str) -> int:
    """Of a text that matches SIZE."""
    found = re.match(SIZE, size)
    assert found is not None, size
    unit = found.group(2)
    return int(float(size.removesuffix(unit)) * UNITS[unit])
