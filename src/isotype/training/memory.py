"""How much memory there is, and how much this process has taken at its highest."""

from __future__ import annotations

import resource
import sys

import torch
from torch import nn

GiB, MiB = 1 << 30, 1 << 20


def peak_memory(device: torch.device) -> int:
    """Bytes: the allocator's peak on a GPU, the process's peak resident size on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


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
