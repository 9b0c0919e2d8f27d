"""How much memory there is, and how much this process has taken at its highest."""

from __future__ import annotations

import ctypes
import resource
import sys

import torch
from torch import nn

GiB, MiB = 1 << 30, 1 << 20
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # glibc's malloc.h
_RETURNED = 128 << 10  # glibc's own threshold before it grows; setting it keeps it from growing
_returning = False


def peak_memory(device: torch.device) -> int:
    """Bytes: the allocator's peak on a GPU, the process's peak resident size on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def return_freed_blocks() -> bool:
    """Makes malloc give blocks from 128 KiB on back to the system as they are freed; whether it could (glibc only).

    Left alone, glibc keeps freed blocks of up to 32 MiB, and a process stays larger than what it holds. Returning them costs page faults:
    3 to 8% of a step's time at a hidden size of 768, 19 to 32% at 256 (docs/decisions/0059), so it is for when memory is near.
    """
    global _returning
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  # not there in other C libraries, whose mallopt means something else or nothing
    except (OSError, AttributeError, TypeError):
        return False
    _returning = all(libc.mallopt(*option) for option in ((_M_MMAP_THRESHOLD, _RETURNED), (_M_TRIM_THRESHOLD, _RETURNED), (_M_TOP_PAD, 0)))
    return _returning


def returns_freed_blocks() -> bool:
    """Whether `return_freed_blocks` is in force."""
    return _returning


def memory_there(total: int, device: torch.device) -> int:
    """What this process may take of a device with `total` bytes: on a GPU without what others hold. 0 where unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return min(total, free + torch.cuda.memory_reserved(device))
    return total


def other_memory(model: nn.Module, device: torch.device) -> int:
    """What this process holds besides the model: libraries and data, which count on a CPU."""
    if device.type != "cpu":
        return 0
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return max(0, peak_memory(device) - weights)


def shown(size: int) -> str:
    """Bytes for people: `1.40 GiB`, `83.0 MiB`."""
    return f"{size / GiB:.2f} GiB" if size >= GiB else f"{size / MiB:.1f} MiB" if size < 100 * MiB else f"{size / MiB:.0f} MiB"
