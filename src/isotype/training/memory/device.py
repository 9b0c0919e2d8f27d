"""How much memory this process may use of its device, how freed memory is given back, and how a
step is made to fit.

`train.gradient_checkpointing: auto` recomputes no layer if the memory plan fits, else as few layers
as needed, the first ones. At the end of forward, where memory is highest, each recomputed layer
saves the same. But in backward the last layers are recomputed while the activations of all others
are still in memory, and the first layers when those have been freed. Attention's output
(`train.keep_attention`) is the most expensive part of a recompute for the memory that it takes: it
is kept where the layers that must recompute fit with it too.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from ...config.schema import RunConfig
from ...wording import format_binary_bytes
from ..step import peak_memory
from .plan import MemoryPlan
from .recomputation import AUTO, LAYERS, NONE, OFFLOAD, Checkpointing

WITHIN = 0.15  # what the plan is right to: measured beside the peak memory of real CPU runs
# simulations between "too few layers" and "all of them"; the peak is nearly linear in their number
_TRIES = 3
# glibc's malloc.h
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_RETURNED = 128 << 10  # glibc's own threshold before it grows; setting it keeps it from growing
_returning = False

Found = tuple[Checkpointing, MemoryPlan]


def return_freed_blocks() -> bool:
    """Makes malloc return freed blocks of 128 KiB and more to the system. Returns whether this is
    possible (glibc only).

    By default glibc retains freed blocks of up to 32 MiB, so that a process uses more memory than
    its tensors. Returning the blocks causes page faults: 3 to 8% of a step's time at a hidden size
    of 768, 19 to 32% at 256. Use it when memory is scarce.
    """
    global _returning
    with contextlib.suppress(OSError, AttributeError, TypeError):
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  # not there in other C libraries, whose mallopt means something else or nothing
        options = ((_M_MMAP_THRESHOLD, _RETURNED), (_M_TRIM_THRESHOLD, _RETURNED), (_M_TOP_PAD, 0))
        _returning = all(libc.mallopt(*option) for option in options)
    return _returning


def trim_freed_blocks() -> None:
    """Gives the system what malloc retains of freed blocks (glibc only): what an observed step
    leaves between the others' blocks.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def returns_freed_blocks() -> bool:
    """Whether `return_freed_blocks` is in force."""
    return _returning


def memory_there(total: int, device: torch.device) -> int:
    """The bytes that this process may use of a device with `total` bytes: on a GPU without those of
    other processes. 0 if unknown.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return min(total, free + torch.cuda.memory_reserved(device))
    return total


def other_memory(model: nn.Module, device: torch.device) -> int:
    """The memory of this process besides the model: libraries and data, which use the same memory
    on a CPU.
    """
    if device.type != "cpu":
        return 0
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return max(0, peak_memory(device) - weights)


def auto_checkpointing(
    simulate: Callable[[Checkpointing], MemoryPlan],
    *,
    layers: int,
    has: int,
    besides: int,
    device_type: str,
    target: int | None = None,
) -> Found:
    """The choice that `auto` makes, and the memory plan for it.

    simulate  the plan of a step under a choice
    layers    how many can recompute
    has       bytes of the device, 0 where unknown; `besides` of them go to something else than the
              step
    target    bytes that the step's plan shall stay below, `train.memory`
    """
    # the target is of the plan, which needs no margin; a device's end is where a run fails
    limits = ([int(has * (1 - WITHIN))] if has else []) + (
        [] if target is None else [target + besides]
    )
    limit = min(limits, default=0)

    def choice(kind: str, n: int, why: str) -> Checkpointing:
        return Checkpointing(kind, tuple(range(n)), layers, f"{AUTO}: {why}")

    def over(plan: MemoryPlan) -> int:
        return plan.peak + besides - limit

    without = simulate(choice(NONE, 0, ""))
    takes = f"the step takes {format_binary_bytes(without.peak + besides)}"
    if not limit or without.not_simulated or not layers:
        if not limit:
            why = "the device's memory is unknown"
        elif not layers:
            why = "no layers that could recompute"
        else:
            why = "the step has no plan"
        return choice(NONE, 0, why), without
    if target is not None and limit == target + besides:
        of = f"{format_binary_bytes(target)} (train.memory)"
    else:
        of = format_binary_bytes(has)
    if over(without) <= 0:
        return choice(NONE, 0, f"{takes} of {of}"), without
    need = f"without it {takes} of {of}"
    found = choice(LAYERS, layers, need)
    plan = simulate(found)
    if over(plan) > 0:
        if device_type == "cpu":
            return found, plan
        found = choice(
            OFFLOAD,
            layers,
            f"{need}, and recomputing alone {format_binary_bytes(plan.peak + besides)}",
        )
        plan = simulate(found)
    else:
        # what one layer saves, measured at both ends; the layers between are checked
        saved = max(1.0, (without.peak - plan.peak) / layers)
        n = 0
        too_much = over(without)
        for _ in range(_TRIES):
            n = max(n + 1, min(layers, n + -int(-too_much // saved)))
            if n >= layers:
                break
            fewer = replace(found, layers=tuple(range(n)))
            fewer_plan = simulate(fewer)
            too_much = over(fewer_plan)
            if too_much <= 0:
                found = fewer
                plan = fewer_plan
                break
    kept = replace(found, keep_attention=True)
    kept_plan = simulate(kept)
    if over(kept_plan) <= 0:
        return (kept, kept_plan)
    return (found, plan)


def less_memory(config: RunConfig, checkpointing: str) -> str:
    """Ways to take less memory that the settings do not have already.

    checkpointing  what the run recomputes, or `train.gradient_checkpointing` where that was not
                   decided yet
    """
    ways = ["train.gradient_checkpointing: layers"] if checkpointing in (NONE, AUTO) else []
    if config.train.batch_size > 1:
        ways.append(
            "a smaller train.batch_size with more train.accumulate (the result is the same)"
        )
    ways.append(
        "a smaller data.max_length"
        if config.images.train is None
        else "a smaller images.resolution"
    )
    if (config.precision.base or config.precision.preset) not in ("nf4", "nf4-lora"):
        ways.append("--preset qlora")
    return ", ".join(ways[:-1]) + (", or " if ways[1:] else "") + ways[-1]
