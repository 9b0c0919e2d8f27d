"""`train.gradient_checkpointing: auto`, and advice for a step that does not fit into memory.

`auto` recomputes no layer if the memory plan fits, else as few layers as needed, the first ones. At the end of forward, where memory is
highest, each recomputed layer saves the same. But in backward the last layers are recomputed while the activations of all others are still
in memory, and the first layers when those have been freed. Attention's output (`train.keep_attention`) is the most expensive part of a
recompute for the memory that it takes: it is kept where the layers that must recompute fit with it too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...config.schema import RunConfig
from .device import shown
from .plan import MemoryPlan
from .recomputation import AUTO, LAYERS, NONE, OFFLOAD, Checkpointing

WITHIN = 0.15  # what the plan is right to: measured beside the peak memory of real CPU runs
_TRIES = 3  # simulations between "too few layers" and "all of them"; the peak is nearly linear in their number

Found = tuple[Checkpointing, MemoryPlan]


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
    has       bytes of the device, 0 where unknown; `besides` of them go to something else than the step
    target    bytes that the step's plan shall stay below, `train.memory`
    """

    def choice(kind: str, n: int, why: str) -> Checkpointing:
        return Checkpointing(kind, tuple(range(n)), layers, f"{AUTO}: {why}")

    # the target is of the plan, which needs no margin; a device's end is where a run fails
    limits = [int(has * (1 - WITHIN))] if has else []
    limit = min(limits + ([] if target is None else [target + besides]), default=0)

    def fits(plan: MemoryPlan) -> bool:
        return plan.peak + besides <= limit

    of = f"{shown(target)} (train.memory)" if target is not None and limit == target + besides else shown(has)
    without = simulate(choice(NONE, 0, ""))
    if not limit or without.not_simulated or not layers:
        why = "the device's memory is unknown" if not limit else "no layers that could recompute" if not layers else "the step has no plan"
        return choice(NONE, 0, why), without
    if fits(without):
        return choice(NONE, 0, f"the step takes {shown(without.peak + besides)} of {of}"), without
    need = f"without it the step takes {shown(without.peak + besides)} of {of}"
    every = choice(LAYERS, layers, need)
    plan = simulate(every)

    def fewest(every: Checkpointing, plan: MemoryPlan) -> Found:
        """As few layers as fit, of a choice for all layers that fits."""
        n = 1
        for _ in range(_TRIES):
            # what one layer saves, measured at both ends; the layers between are checked
            saved = max(1.0, (without.peak - plan.peak) / layers)
            n = max(n, min(layers, -int(-(without.peak + besides - limit) // saved)))
            if n >= layers:
                break
            fewer = replace(every, layers=tuple(range(n)))
            fewer_plan = simulate(fewer)
            if fits(fewer_plan):
                return fewer, fewer_plan
            n += max(1, -int(-(fewer_plan.peak + besides - limit) // saved))
        return every, plan

    def with_attention(found: Checkpointing, plan: MemoryPlan) -> Found:
        """The same with attention's results kept, where that fits too."""
        kept = replace(found, keep_attention=True)
        kept_plan = simulate(kept)
        return (kept, kept_plan) if fits(kept_plan) else (found, plan)

    if not fits(plan):
        if device_type == "cpu":
            return every, plan
        away = choice(OFFLOAD, layers, f"{need}, and recomputing alone {shown(plan.peak + besides)}")
        return with_attention(away, simulate(away))
    return with_attention(*fewest(every, plan))


def less_memory(config: RunConfig, checkpointing: str) -> str:
    """Ways to take less memory that the settings do not have already.

    checkpointing  what the run recomputes, or `train.gradient_checkpointing` where that was not decided yet
    """
    ways = ["train.gradient_checkpointing: layers"] if checkpointing in (NONE, AUTO) else []
    if config.train.batch_size > 1:
        ways.append("a smaller train.batch_size with more train.accumulate (the result is the same)")
    ways.append("a smaller data.max_length" if config.images.train is None else "a smaller images.resolution")
    if (config.precision.base or config.precision.preset) not in ("nf4", "nf4-lora"):
        ways.append("--preset qlora")
    return ", ".join(ways[:-1]) + (", or " if ways[1:] else "") + ways[-1]
