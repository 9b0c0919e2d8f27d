"""Computes how much memory this process may use on its device, returns freed memory to the system,
and chooses recomputation so that a step fits into the memory.

With `train.gradient_checkpointing: auto`, no layer is recomputed if the planned memory fits.
Otherwise as few layers as possible are recomputed, beginning with the first layers of the model.
Most memory is in use at the end of forward. For the memory at this point, it does not matter which
layers are recomputed, because each recomputed layer saves the same amount. For the memory in
backward, it does matter. The last layers run again while the activations of all other layers are
still in memory. When the first layers run again, those activations have already been freed.

A layer that is recomputed may still keep some of its tensors in memory, so that these tensors need
not be computed again. Of all these tensors, the output of attention saves the most time for each
byte of memory. So this output is kept (`train.keep_attention`) if the step then still fits into the
memory.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import replace

import torch

from ...config.schema import RunConfig
from ...wording import format_binary_bytes
from .plan import MemoryPlan
from .recomputation import AUTO, LAYERS, NONE, OFFLOAD, Checkpointing

# Share of a device's memory that a planned run leaves free. It is the plan's largest error in real
# CPU runs. On a GPU, the driver, the CUDA context and other programs need memory too: in six reports
# of an exhausted GeForce card of 6 to 12 GB, the bytes that PyTorch had reserved and the free bytes
# were together 79, 82, 83, 89, 94 and 94% of the card's memory.
# Source  issues on GitHub, in this order: zhou13/lcnn 23, akshitac8/OW-DETR 46,
#         Kunhao-Liu/StyleGaussian 12, TencentARC/PhotoMaker 47, ToTheBeginning/PuLID 13,
#         JiehongLin/SAM-6D 13
PLAN_TOLERANCE = 0.15
# memory of libraries, kernels, scratch and observed dtypes that a process uses while it trains, in
# addition to what it uses after it has read its data. Beyond what `isotype plan` counts for its own
# process, 29 to 45 MiB were measured with an adapter, and 74 MiB without
TRAINING_PROCESS_BYTES = 64 << 20
# number of simulations with some of the layers recomputed; few are enough, because the peak is
# nearly a linear function of the number of recomputed layers
_MAX_SIMULATIONS = 3
# glibc's malloc.h
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2  # bytes by which the heap grows beyond a request
_M_MMAP_THRESHOLD = -3  # allocations of this size and larger are mapped on their own
_RETURN_THRESHOLD = 128 << 10  # the initial threshold of glibc, which raises it unless it was set
_is_returning = False

# the chosen gradient checkpointing, and the memory that is planned for it
PlannedCheckpointing = tuple[Checkpointing, MemoryPlan]


def memory_limit(device_bytes: int) -> int:
    """Returns the largest planned peak with which a run fits into a device with this memory. All
    code that decides whether a run fits uses this function.
    """
    return int(device_bytes * (1 - PLAN_TOLERANCE))


def return_freed_blocks() -> bool:
    """Makes malloc return freed memory blocks of 128 KiB and more to the system. Returns True if
    malloc has this setting; only the malloc of glibc has it.

    By default, glibc keeps freed blocks of up to 32 MiB, so that a process uses more memory than
    its tensors need. But if the blocks are returned, page faults make the steps slower. These page
    faults took 3 to 8% of a step's time at a hidden size of 768, and 19 to 32% at a hidden size of
    256. Therefore call this function only if memory is scarce.
    """
    global _is_returning
    with contextlib.suppress(OSError, AttributeError, TypeError):
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  # not there in other C libraries, whose mallopt means something else or nothing
        options = (
            (_M_MMAP_THRESHOLD, _RETURN_THRESHOLD),
            (_M_TRIM_THRESHOLD, _RETURN_THRESHOLD),
            (_M_TOP_PAD, 0),
        )
        _is_returning = all(libc.mallopt(*option) for option in options)
    return _is_returning


def trim_freed_blocks() -> None:
    """Gives freed memory blocks, which malloc keeps for later use, back to the operating system.
    This works only with glibc. For example, a step in which dtypes are recorded frees many such
    blocks.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def returns_freed_blocks() -> bool:
    """Returns True if `return_freed_blocks` was called and took effect."""
    return _is_returning


def available_memory(device_bytes: int, device: torch.device) -> int:
    """Returns how many bytes this process may use on a device with `device_bytes` bytes. On a GPU,
    the bytes of other processes are subtracted. Returns 0 if the number is unknown.
    """
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return min(device_bytes, free_bytes + torch.cuda.memory_reserved(device))
    return device_bytes


def overhead_memory(process_bytes: int) -> int:
    """Returns the bytes that this process uses for libraries and data while it trains. If the model
    is on the CPU, these bytes are in the same memory as the model.

    process_bytes  the bytes that the process used before it loaded the model; 0 on a GPU
    """
    return process_bytes + TRAINING_PROCESS_BYTES if process_bytes else 0


def choose_checkpointing_by_plan(
    simulate: Callable[[Checkpointing], MemoryPlan],
    *,
    layers: int,
    available: int,
    overhead: int,
    device_type: str,
    target_bytes: int | None = None,
) -> PlannedCheckpointing:
    """Returns which layers recompute with the setting `auto`, and the memory plan for this choice.

    simulate      a function that plans the memory of a step with a given choice
    layers        the number of layers that can recompute
    available     number of bytes that the device has; 0 if unknown
    overhead      how many of these bytes are used by something other than the step
    target_bytes  the largest number of bytes that the planned step may use, from `train.memory`
    """
    # a run that exceeds the device's memory fails, so a margin is kept for the plan's error; a run
    # that exceeds the target goes on, so the target has no margin
    limits = ([memory_limit(available)] if available else []) + (
        [] if target_bytes is None else [target_bytes + overhead]
    )
    limit = min(limits, default=0)

    def choice(kind: str, count: int, reason: str) -> Checkpointing:
        return Checkpointing(kind, tuple(range(count)), layers, f"{AUTO}: {reason}")

    def excess(plan: MemoryPlan) -> int:
        return plan.peak + overhead - limit

    without_recompute = simulate(choice(NONE, 0, ""))
    step_text = f"the step takes {format_binary_bytes(without_recompute.peak + overhead)}"
    if not limit or without_recompute.not_simulated or not layers:
        if not limit:
            reason = "the device's memory is unknown"
        elif not layers:
            reason = "no layers that could recompute"
        else:
            reason = "the step has no plan"
        return choice(NONE, 0, reason), without_recompute
    if target_bytes is not None and limit == target_bytes + overhead:
        limit_text = f"{format_binary_bytes(target_bytes)} (train.memory)"
    else:
        limit_text = format_binary_bytes(available)
    if excess(without_recompute) <= 0:
        return choice(NONE, 0, f"{step_text} of {limit_text}"), without_recompute
    need_text = f"without it {step_text} of {limit_text}"
    checkpointing = choice(LAYERS, layers, need_text)
    plan = simulate(checkpointing)
    if excess(plan) > 0:
        if device_type == "cpu":
            return checkpointing, plan
        checkpointing = choice(
            OFFLOAD,
            layers,
            f"{need_text}, and recomputing alone {format_binary_bytes(plan.peak + overhead)}",
        )
        plan = simulate(checkpointing)
    else:
        # the saving per layer, from the plans with no layer and with all layers recomputed; a
        # number of layers in between is tried with a plan of its own
        saved_per_layer = max(1.0, (without_recompute.peak - plan.peak) / layers)
        count = 0
        excess_bytes = excess(without_recompute)
        for _ in range(_MAX_SIMULATIONS):
            count = max(count + 1, min(layers, count + -int(-excess_bytes // saved_per_layer)))
            if count >= layers:
                break
            fewer_layers = replace(checkpointing, layers=tuple(range(count)))
            fewer_plan = simulate(fewer_layers)
            excess_bytes = excess(fewer_plan)
            if excess_bytes <= 0:
                checkpointing = fewer_layers
                plan = fewer_plan
                break
    attention_kept = replace(checkpointing, keep_attention=True)
    attention_kept_plan = simulate(attention_kept)
    if excess(attention_kept_plan) <= 0:
        return (attention_kept, attention_kept_plan)
    return (checkpointing, plan)


def memory_saving_advice(config: RunConfig, checkpointing: str) -> str:
    """Returns advice on settings that save memory. The advice names only settings that the run does
    not use yet.

    checkpointing  the kind of recomputation of the run; if it is not decided yet, the value of
                   `train.gradient_checkpointing`
    """
    advice = ["train.gradient_checkpointing: layers"] if checkpointing in (NONE, AUTO) else []
    if config.train.batch_size > 1:
        advice.append(
            "a smaller train.batch_size with more train.accumulate (the result is the same)"
        )
    if config.images.train is None:
        advice.append("a smaller data.max_length")
    else:
        advice.append("a smaller images.resolution")
    if config.images.frames > 1:
        advice.append("fewer images.frames")
    if (config.precision.base or config.precision.preset) not in ("nf4", "nf4-lora"):
        advice.append("--preset qlora")
    return ", ".join(advice[:-1]) + (", or " if advice[1:] else "") + advice[-1]
