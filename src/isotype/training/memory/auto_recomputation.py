"""`train.gradient_checkpointing: auto`: recomputes no layer if the memory plan fits, else as few layers as needed.

It recomputes the first layers. At the end of forward, where memory is highest, each recomputed layer saves the same. But in backward the
last layers are recomputed while the activations of all others are still in memory, and the first layers when those have been freed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .device import shown
from .plan import MemoryPlan
from .recomputation import AUTO, LAYERS, NONE, OFFLOAD, Checkpointing

WITHIN = 0.15  # what the plan is right to (docs/decisions/0051)
_TRIES = 3  # simulations between "too few layers" and "all of them"; the peak is nearly linear in their number


def auto_checkpointing(
    simulate: Callable[[Checkpointing], MemoryPlan], *, layers: int, has: int, besides: int, device_type: str, target: int | None = None
) -> tuple[Checkpointing, MemoryPlan]:
    """The choice that `auto` makes, and the memory plan for it.

    simulate  the plan of a step under a choice
    layers    how many can recompute
    has       bytes of the device, 0 where unknown; `besides` of them go to something else than the step
    target    bytes that the step's plan shall stay below, `train.memory`
    """

    def choice(kind: str, n: int, why: str) -> Checkpointing:
        return Checkpointing(kind, tuple(range(n)), layers, f"{AUTO}: {why}")

    def peak(plan: MemoryPlan) -> int:
        return plan.peak + besides

    # the target is of the plan, which needs no margin; a device's end is where a run fails

    def with_attention(found: Checkpointing, plan: MemoryPlan) -> tuple[Checkpointing, MemoryPlan]:
        """The same with attention's results kept, where that fits too: it is the dearest part of a recompute for what it holds."""
        kept = replace(found, keep_attention=True)
        kept_plan = simulate(kept)
        return (kept, kept_plan) if peak(kept_plan) <= limit else (found, plan)

    limit = (
        min(n for n in (int(has * (1 - WITHIN)) if has else None, None if target is None else target + besides) if n)
        if has or target
        else 0
    )
    of = f"{shown(target)} (train.memory)" if target is not None and limit == target + besides else shown(has)
    without = simulate(choice(NONE, 0, ""))
    if not limit or without.not_simulated or not layers:
        why = "the device's memory is unknown" if not limit else "no layers that could recompute" if not layers else "the step has no plan"
        return choice(NONE, 0, why), without
    if peak(without) <= limit:
        return choice(NONE, 0, f"the step takes {shown(peak(without))} of {of}"), without
    need = f"without it the step takes {shown(peak(without))} of {of}"
    every = choice(LAYERS, layers, need)
    plan = simulate(every)
    if peak(plan) > limit:
        if device_type == "cpu":
            return every, plan
        away = choice(OFFLOAD, layers, f"{need}, and recomputing alone {shown(peak(plan))}")
        return with_attention(away, simulate(away))
    n = 1
    for _ in range(_TRIES):
        # what one layer saves, measured at both ends; the layers between are checked
        saved = max(1.0, (peak(without) - peak(plan)) / layers)
        n = max(n, min(layers, -int(-(peak(without) - limit) // saved)))
        if n >= layers:
            break
        fewer = choice(LAYERS, n, need)
        fewer_plan = simulate(fewer)
        if peak(fewer_plan) <= limit:
            return with_attention(fewer, fewer_plan)
        n += max(1, -int(-(peak(fewer_plan) - limit) // saved))
    return with_attention(every, plan)
