"""Tells an error for want of memory from others: PyTorch has a class for that of a GPU alone, on a CPU it is a RuntimeError like any."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import torch

# "... DefaultCPUAllocator: can't allocate memory: you tried to allocate 11096064 bytes. Error code 12", on Windows "not enough memory: ..."
_ON_A_CPU = re.compile(r"DefaultCPUAllocator: (?:can't allocate|not enough) memory: you tried to allocate (\d+) bytes")
_PLAIN = ("std::bad_alloc", "Cannot allocate memory")
# errors that have other causes too, and are for want of memory in a process that has reached its limit of address space (ulimit -v):
# Python 3.11 and 3.12 raise the first where they cannot allocate a frame, a thread needs room for its stack, a library for its code
_AT_THE_LIMIT = ("without exception set", "without setting an exception", "can't start new thread", "failed to map segment")
_NEAR = 16 << 20  # bytes: more than the stack of a thread


def out_of_memory(error: BaseException) -> str | None:
    """What was asked for, in a line, if memory was missing; else None."""
    if isinstance(error, torch.OutOfMemoryError):
        return str(error).splitlines()[0]
    if isinstance(error, MemoryError):
        return str(error) or "Python could not allocate memory"
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return str(error)
    if not isinstance(error, RuntimeError | SystemError | ImportError | OSError):
        return None
    said = str(error)
    if found := _ON_A_CPU.search(said):
        return f"tried to allocate {int(found[1]):,} bytes"
    if any(words in said for words in _PLAIN):
        return said.splitlines()[0]
    if any(words in said for words in _AT_THE_LIMIT) and (limit := _limit_reached()) is not None:
        return f"the process has reached its limit of {limit:,} bytes of address space (ulimit -v): {said.splitlines()[0]}"
    return None


def _limit_reached() -> int | None:
    """The limit of the process's address space where it has come near it; None where there is none, or the system does not say."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        peak = re.search(r"^VmPeak:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except (ImportError, OSError):
        return None
    return limit if limit != resource.RLIM_INFINITY and peak and int(peak[1]) * 1024 > limit - _NEAR else None
