"""The memory of one process of several that share a model, from the plan of a step on one process.

Of weights, gradients and states a process holds 1 / parts (the scales of 4-bit weights whole). Besides, it holds what is gathered at a
time: the last unit (norm and head) from forward to backward, and two layers, of which one runs while the next is gathered; and in backward
the whole gradient of a layer, once as autograd makes it and once as it is sent. The peaks of forward and backward are planned apart: no
gradient is gathered in a forward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from ...config.schema import TrainSection
from ...distributed.shard import units_of
from ...dtypes import to_torch
from ...precision.apply import inner_model
from ...precision.precision import Precision
from ..task import Outline, StepOutline
from .outline import scales_of
from .plan import MemoryPlan, plan_memory
from .recomputation import Checkpointing


@dataclass(frozen=True)
class UnitBytes:
    """Of one FSDP unit: its weights, those of them that are trained, the trained elements, and the scales of 4-bit weights.

    All as they travel: rows that do not come out even are padded to equal parts.
    """

    weights: int
    trained: int
    elements: int
    scales: int


def unit_bytes(model: nn.Module, parts: int) -> list[UnitBytes]:
    """Of every unit of a model as `distributed.shard` would cut it for so many processes, the root last; the model may be on the meta
    device."""
    inner = inner_model(model)
    inside: set[int] = set()
    found = []
    for _, module in [*units_of(inner), ("", inner)]:
        own = [p for p in module.parameters() if id(p) not in inside]
        inside |= {id(p) for p in own}
        elements = [padded_elements(p, parts) for p in own]
        sizes = [n * p.element_size() for p, n in zip(own, elements)]
        found.append(
            UnitBytes(
                sum(sizes),
                sum(size for p, size in zip(own, sizes) if p.requires_grad),
                sum(n for p, n in zip(own, elements) if p.requires_grad),
                sum(t.numel() * t.element_size() for p in own for t in scales_of(p)),
            )
        )
    return found


def padded_elements(weight: Tensor, parts: int) -> int:
    """The elements of a weight whose rows are filled up to equal parts, as FSDP2 keeps and sends them."""
    if weight.dim() == 0 or weight.numel() == 0:
        return weight.numel()
    return weight.numel() // len(weight) * parts * -(-len(weight) // parts)


def plan_part(
    made: Outline, train: TrainSection, precision: Precision, largest: StepOutline, *, checkpointing: Checkpointing, device_type: str,
    parts: int, earlier: MemoryPlan | None = None,
) -> MemoryPlan:  # fmt: skip
    """`plan_memory` for a process that shares its model with others; the same for `parts` 1."""
    units = unit_bytes(made.model, parts) if parts > 1 else []
    if parts > 1:
        # with gradients of an earlier micro-batch present, a backward adds no gradient buffers: they exist for the own part only
        train = train.model_copy(update={"accumulate": max(2, train.accumulate)})
    plan = plan_memory(made, train, precision, largest, checkpointing=checkpointing, device_type=device_type, earlier=earlier)
    if parts == 1:
        return plan
    *layers, root = units
    trained = sum(unit.trained for unit in units) // parts
    # with their padding, states and gradients grow as the trained weights do
    own = trained / plan.trained if plan.trained else 0.0
    # the root from forward to backward, and the two largest layers
    gathered = root.weights + sum(sorted(unit.weights for unit in layers)[-2:])
    # the gradient of a unit, in its weights' dtype as autograd makes it, and as it is sent
    sums = max(unit.trained + unit.elements * to_torch(precision.reduce).itemsize for unit in units)
    # gloo gathers a unit into a copy before it fills FSDP's buffer; NCCL needs none
    copy = max(unit.weights for unit in units) if device_type == "cpu" else 0
    shared = replace(
        plan,
        frozen=sum(unit.weights for unit in units) // parts - trained + sum(unit.scales for unit in units),
        trained=trained,
        gradients=round(plan.gradients * own),
        optimizer=round(plan.optimizer * own),
        update=round(plan.update * own),
        gathered=gathered + max(sums, copy),
    )
    forward = max(plan.forward, plan.evaluation, plan.sampling or 0) + gathered + copy
    backward = plan.activations + plan.backward + gathered + max(sums, copy)
    return replace(shared, peak=shared.held + max(forward, backward, shared.update))
