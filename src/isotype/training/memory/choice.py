"""Chooses which layers of a run recompute their activations. Either the configuration names these
layers, or they are chosen with a plan of the memory that a step needs.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ...config.schema import RunConfig, size_in_bytes
from ...wording import format_binary_bytes
from ..device_setup import DeviceSetup
from ..task import ModelOutline, StepOutline, Task
from .blocks import OFFLOAD_SETTING, effective_train_settings
from .device import (
    available_memory,
    choose_checkpointing_by_plan,
    overhead_memory,
    return_freed_blocks,
)
from .plan import MemoryPlan, plan_process_memory
from .recomputation import (
    AUTO,
    NONE,
    Checkpointing,
    checkpointable_layers,
    configured_checkpointing,
)


def choose_checkpointing(
    task: Task, device_setup: DeviceSetup, model: nn.Module, *, parts: int = 1, source: str = ""
) -> Checkpointing:
    """Returns which layers recompute, according to the configuration. For the setting `auto`, this
    function plans the memory of a step on the longest rows. No plan is made if an upper bound of
    the needed memory is far below the available memory.

    parts   the number of processes that share the model
    source  the place where the value of the setting was set. In a resumed run, `source` is the
            reason for the choice that `auto` made at an earlier start of the run.
    """
    train = effective_train_settings(task.config)
    device = device_setup.device
    precision = device_setup.resolved.precision
    available = available_memory(device_setup.hardware.memory, device)
    overhead = overhead_memory(device_setup.process_bytes)
    upper_bound = task.max_step_bytes(model, precision) + overhead
    is_near_limit = upper_bound > available // 2
    if is_near_limit and available and device.type == "cpu":
        # otherwise the process would use more memory than planned
        return_freed_blocks()
    if train.gradient_checkpointing != AUTO:
        configured = _configured_checkpointing(model, task.config)
        if source.startswith(f"{AUTO}: "):
            return replace(configured, reason=source)
        return configured
    target = None if train.memory is None else size_in_bytes(train.memory)
    if not is_near_limit and (target is None or upper_bound - overhead <= target):
        return Checkpointing(
            NONE,
            reason=f"auto: the step cannot take more than {format_binary_bytes(upper_bound)} of {format_binary_bytes(available)}",
        )
    model_outline = task.outline_model(precision, device_type=device.type)
    checkpointing, _ = planned_checkpointing(
        task,
        device_setup,
        model_outline,
        task.outline_largest_step(precision),
        available=available,
        overhead=overhead,
        parts=parts,
    )
    return checkpointing


def _configured_checkpointing(model: nn.Module, config: RunConfig) -> Checkpointing:
    configured = configured_checkpointing(model, effective_train_settings(config))
    if config.train.gradient_checkpointing == AUTO:
        return replace(configured, reason=f"{AUTO}: {OFFLOAD_SETTING}")
    return configured


def planned_checkpointing(
    task: Task,
    device_setup: DeviceSetup,
    model_outline: ModelOutline,
    step_outline: StepOutline,
    *,
    available: int,
    overhead: int,
    parts: int = 1,
) -> tuple[Checkpointing, MemoryPlan]:
    """Returns which layers recompute, and the memory plan of a step with this choice.

    available  number of bytes that the device has
    overhead   how many of these bytes are used by something other than the step
    parts      the number of processes that share the model
    """
    train = effective_train_settings(task.config)
    precision = device_setup.resolved.precision
    earlier_plan: MemoryPlan | None = None

    def simulate(checkpointing: Checkpointing) -> MemoryPlan:
        nonlocal earlier_plan
        plan = plan_process_memory(
            model_outline,
            train,
            precision,
            step_outline,
            checkpointing=checkpointing,
            device_type=device_setup.device.type,
            parts=parts,
            earlier_plan=earlier_plan,
        )
        if earlier_plan is None and not plan.not_simulated:
            earlier_plan = plan
        return plan

    if train.gradient_checkpointing != AUTO:
        checkpointing = _configured_checkpointing(model_outline.model, task.config)
        return checkpointing, simulate(checkpointing)
    layer_count = len(checkpointable_layers(model_outline.model))
    target = None if train.memory is None else size_in_bytes(train.memory)
    return choose_checkpointing_by_plan(
        simulate,
        layers=layer_count,
        available=available,
        overhead=overhead,
        device_type=device_setup.device.type,
        target_bytes=target,
    )
