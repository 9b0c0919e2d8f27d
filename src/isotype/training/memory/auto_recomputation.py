"""`train.gradient_checkpointing: auto`: nothing is recomputed where the memory plan fits, else as few layers as will do.

The first layers are the ones to recompute: at the end of forward, where memory is highest, every layer that keeps only its input saves
the same; but the last layers recompute while the activations of all others are still held, and the first ones when those are gone.
"""

from __future__ import annotations

from collections.abc import Callable

from .device import shown
from .plan import MemoryPlan
from .recomputation import AUTO, LAYERS, NONE, OFFLOAD, Checkpointing

WITHIN = 0.15  # what the plan is right to (docs/decisions/0051)
_TRIES = 3  # simulations between "too few layers" and "all of them"; the peak is nearly linear in their number


def auto_checkpointing(
    simulate: Callable[[Checkpointing], MemoryPlan], *, layers: int, has: int, besides: int, device_type: str
) -> tuple[Checkpointing, MemoryPlan]:
    """What `auto` becomes, and its plan.

    simulate  the plan of a step under a choice
    layers    how many can recompute
    has       bytes of the device, 0 where unknown; `besides` of them go to something else than the step
    """

    def choice(kind: str, n: int, why: str) -> Checkpointing:
        return Checkpointing(kind, tuple(range(n)), layers, f"{AUTO}: {why}")

    def peak(plan: MemoryPlan) -> int:
        return plan.peak + besides

    limit = int(has * (1 - WITHIN))
    without = simulate(choice(NONE, 0, ""))
    if not has or without.not_simulated or not layers:
        why = "the device's memory is unknown" if not has else "no layers that could recompute" if not layers else "the step has no plan"
        return choice(NONE, 0, why), without
    if peak(without) <= limit:
        return choice(NONE, 0, f"the step takes {shown(peak(without))} of {shown(has)}"), without
    need = f"without it the step takes {shown(peak(without))} of {shown(has)}"
    every = choice(LAYERS, layers, need)
    plan = simulate(every)
    if peak(plan) > limit:
        if device_type == "cpu":
            return every, plan
        away = choice(OFFLOAD, layers, f"{need}, and recomputing alone {shown(peak(plan))}")
        return away, simulate(away)
    n = 1
    for _ in range(_TRIES):
        # what one layer saves, from the two ends; the rest is checked, not trusted
        saved = max(1.0, (peak(without) - peak(plan)) / layers)
        n = max(n, min(layers, -int(-(peak(without) - limit) // saved)))
        if n >= layers:
            break
        fewer = choice(LAYERS, n, need)
        fewer_plan = simulate(fewer)
        if peak(fewer_plan) <= limit:
            return fewer, fewer_plan
        n += max(1, -int(-(peak(fewer_plan) - limit) // saved))
    return every, plan
