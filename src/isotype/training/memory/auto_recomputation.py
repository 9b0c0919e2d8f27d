"""`train.gradient_checkpointing: auto`: recomputes no layer if the memory plan fits, else as few layers as needed.

It recomputes the first layers. At the end of forward, where memory is highest, each recomputed layer saves the same. But in backward the
last layers are recomputed while the activations of all others are still in memory, and the first layers when those have been freed.

What a recomputed layer may keep (`train.keep_attention`) costs memory and saves work. Attention's output is the dearest part of a recompute
for what it holds, and is kept where that fits. With attention's results or everything kept (`all`) more layers may have to recompute, each
of which is cheaper: that is chosen where the step's ledger says that it takes less time. With offload what is kept waits in host memory,
and only time decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from .device import shown
from .plan import MemoryPlan
from .recomputation import AUTO, LAYERS, NONE, OFFLOAD, Checkpointing

WITHIN = 0.15  # what the plan is right to
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
    plain: bool = False,
    seconds: Callable[[Checkpointing], float] | None = None,
) -> Found:
    """The choice that `auto` makes, and the memory plan for it.

    simulate  the plan of a step under a choice
    layers    how many can recompute
    has       bytes of the device, 0 where unknown; `besides` of them go to something else than the step
    target    bytes that the step's plan shall stay below, `train.memory`
    plain     layers are recomputed whole, and nothing goes to host memory: what compiled layers can do
    seconds   of a step under a choice, by the ledger, infinite where host memory is too small for what goes there; None where no device's
              figures are known, or layers cannot be halved
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

    def by_time(found: Checkpointing, plan: MemoryPlan) -> Found:
        """The same, or as few layers as fit with attention or with everything kept, whichever takes least time."""
        assert seconds is not None
        best, first = (found, plan), seconds(found)
        least = first
        attention = replace(every, keep_attention=True)
        for kept in (attention, replace(attention, keep_projections=True, halves=True)):
            if found.keep_attention and not kept.halves:
                continue
            kept_plan = simulate(kept)
            if fits(kept_plan):
                kept, kept_plan = fewest(kept, kept_plan)
                if (taken := seconds(kept)) < least:
                    least = taken
                    reason = f"{found.reason}; what is kept saves {1e3 * (first - least):.1f} ms by the ledger"
                    best = replace(kept, reason=reason), kept_plan
        return best

    def with_everything(found: Checkpointing, plan: MemoryPlan) -> Found:
        """The same with everything in host memory that a layer keeps, where that takes less time, or alone fits."""
        assert seconds is not None
        kept = replace(found, keep_attention=True, keep_projections=True, halves=True)
        kept_plan = simulate(kept)
        if (fits(plan) or kept_plan.peak > plan.peak) and not fits(kept_plan):
            return found, plan
        saved = seconds(found) - seconds(kept)
        if saved > 0:
            return replace(kept, reason=f"{found.reason}; what is kept saves {1e3 * saved:.1f} ms by the ledger"), kept_plan
        if fits(kept_plan) and not fits(plan) and saved > -math.inf:
            return replace(kept, reason=f"{found.reason}; only with everything kept in host memory it fits"), kept_plan
        return found, plan

    if not fits(plan):
        if device_type == "cpu" or plain:
            return every, plan
        away = choice(OFFLOAD, layers, f"{need}, and recomputing alone {shown(plan.peak + besides)}")
        found, plan = with_attention(away, simulate(away))
        return (found, plan) if seconds is None else with_everything(found, plan)
    found, plan = fewest(every, plan)
    if plain:
        return found, plan
    found, plan = with_attention(found, plan)
    return (found, plan) if seconds is None else by_time(found, plan)
