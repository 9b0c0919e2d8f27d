"""How much memory the device has, and how much of it this process may use."""

from __future__ import annotations

import contextlib
import ctypes

import torch
from torch import nn

from ..step import peak_memory

GiB, MiB = 1 << 30, 1 << 20
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # glibc's malloc.h
_RETURNED = 128 << 10  # glibc's own threshold before it grows; setting it keeps it from growing
_returning = False


def return_freed_blocks() -> bool:
    """Makes malloc return freed blocks of 128 KiB and more to the system. Returns whether this is possible (glibc only).

    By default glibc retains freed blocks of up to 32 MiB, so that a process uses more memory than its tensors. Returning the blocks causes
    page faults: 3 to 8% of a step's time at a hidden size of 768, 19 to 32% at 256. Use it when memory is scarce.
    """
    global _returning
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  # not there in other C libraries, whose mallopt means something else or nothing
    except (OSError, AttributeError, TypeError):
        return False
    _returning = all(libc.mallopt(*option) for option in ((_M_MMAP_THRESHOLD, _RETURNED), (_M_TRIM_THRESHOLD, _RETURNED), (_M_TOP_PAD, 0)))
    return _returning


def trim_freed_blocks() -> None:
    """Gives the system what malloc retains of freed blocks (glibc only): what an observed step leaves between the others' blocks."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def returns_freed_blocks() -> bool:
    """Whether `return_freed_blocks` is in force."""
    return _returning


def memory_there(total: int, device: torch.device) -> int:
    """The bytes that this process may use of a device with `total` bytes: on a GPU without those of other processes. 0 if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return min(total, free + torch.cuda.memory_reserved(device))
    return total


def other_memory(model: nn.Module, device: torch.device) -> int:
    """The memory of this process besides the model: libraries and data, which use the same memory on a CPU."""
    if device.type != "cpu":
        return 0
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return max(0, peak_memory(device) - weights)


def shown(size: int) -> str:
    """Bytes for people: `1.40 GiB`, `83.0 MiB`."""
    return f"{size / GiB:.2f} GiB" if size >= GiB else f"{size / MiB:.1f} MiB" if size < 100 * MiB else f"{size / MiB:.0f} MiB"
