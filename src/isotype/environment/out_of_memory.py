"""Tells an error for want of memory from others: PyTorch has a class for that of a GPU alone, on a CPU it is a RuntimeError like any."""

from __future__ import annotations

import errno
import re

import torch

# "... DefaultCPUAllocator: can't allocate memory: you tried to allocate 11096064 bytes. Error code 12", on Windows "not enough memory: ..."
_ON_A_CPU = re.compile(r"DefaultCPUAllocator: (?:can't allocate|not enough) memory: you tried to allocate (\d+) bytes")
_PLAIN = ("std::bad_alloc", "Cannot allocate memory")


def out_of_memory(error: BaseException) -> str | None:
    """What was asked for, in a line, if memory was missing; else None."""
    if isinstance(error, torch.OutOfMemoryError):
        return str(error).splitlines()[0]
    if isinstance(error, MemoryError):
        return str(error) or "Python could not allocate memory"
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return str(error)
    if not isinstance(error, RuntimeError):
        return None
    said = str(error)
    if found := _ON_A_CPU.search(said):
        return f"tried to allocate {int(found[1]):,} bytes"
    if any(words in said for words in _PLAIN):
        return said.splitlines()[0]
    return None
