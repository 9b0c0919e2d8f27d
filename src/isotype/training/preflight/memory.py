"""PF011: the run will not fit into the device's memory.

Running the step on tensors without data takes seconds, so it is done only if a generous upper bound comes near the available memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...counted import counted
from ...finding import Finding, Place, Severity
from ..memory.advice import less_memory
from ..memory.auto_recomputation import WITHIN
from ..memory.device import memory_there, other_memory, shown
from ..memory.distributed_plan import plan_part
from ..setup import Prepared
from .subject import Subject


def out_of_memory(subject: Subject[Any]) -> Iterator[Finding]:
    prepared, config, task = subject.prepared, subject.config, subject.task
    assert isinstance(prepared, Prepared), "the loop's own run: an attached trainer's memory is not planned"
    precision, device = prepared.resolved.precision, prepared.device.type
    has = memory_there(prepared.hardware.memory, prepared.device)
    besides = other_memory(prepared.model, prepared.device)
    if not has or task.most_bytes(prepared.model, precision) + besides <= has // 2:
        return
    plan = plan_part(
        task.outline(precision, device_type=device),
        config.train,
        precision,
        task.step_outline(precision),
        checkpointing=prepared.checkpointing,
        device_type=device,
        parts=1 if prepared.sharding is None else prepared.sharding.parts,
    )
    needs = plan.peak + besides
    if needs <= has * (1 - WITHIN):
        return
    fits = needs <= has * (1 + WITHIN)
    yield Finding(
        code="PF011", severity=Severity.WARNING if fits else Severity.ERROR, place=Place(symbol="train.batch_size, data.max_length"),
        message=f"the step on the longest rows {'may' if fits else 'will'} not fit: {shown(needs)} of {shown(has)}",
        details=(
            ("weights", shown(plan.frozen + plan.trained)),
            ("training", f"{shown(plan.gradients)} of gradients, {shown(plan.optimizer)} of optimizer states"),
            ("step", f"{shown(plan.peak - plan.held)} on {counted(plan.rows, 'row')} of length {plan.length}"),
        ),
        cause=f"not simulated, weights and states only: {plan.not_simulated}" if plan.not_simulated else None,
        fix=less_memory(config, prepared.checkpointing.kind, device_type=device, model=prepared.model),
    )  # fmt: skip
