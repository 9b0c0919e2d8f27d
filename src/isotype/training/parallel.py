"""Decides how the processes of a run work together in a step. Either each process has the whole
model, or the processes share its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..config.schema import RunConfig
from ..distributed.world import World
from ..errors import UsageError
from ..model.initialisation import SUBTRACTED_STARTS
from ..precision.precision import EIGHT_BIT_OPTIMIZERS
from ..wording import format_binary_bytes
from .device_setup import DeviceSetup
from .memory.blocks import BLOCKS, OFFLOAD_SETTING
from .memory.choice import planned_checkpointing
from .memory.device import available_memory, memory_limit
from .memory.recomputation import AUTO
from .task import Task

REPLICATE = "replicate"
SHARD = "shard"
HYBRID = "hybrid"


@dataclass(frozen=True)
class Parallel:
    """How the processes of a run share a model.

    kind    `replicate` (each process has the whole model), `shard` (all processes share one model),
            or `hybrid` (the processes of each machine share one model)
    reason  the setting with which the user chose this, or the reason for the choice of `auto`
    nodes   for `hybrid`, the number of machines, each of which has a whole model; otherwise 1
    """

    kind: str
    reason: str = ""
    nodes: int = 1

    @property
    def is_shared(self) -> bool:
        return self.kind != REPLICATE

    def processes_per_model(self, size: int) -> int:
        """Returns how many of the `size` processes share one model."""
        return size // self.nodes if self.is_shared else 1

    def __str__(self) -> str:
        if self.reason:
            return f"{self.kind} ({self.reason})"
        return self.kind


ONE_PROCESS = Parallel(REPLICATE)


def configured_parallel(config: RunConfig, world: World) -> Parallel | None:
    """Returns the kind of parallelism that the configuration names. Returns None if it is `auto`,
    because the kind then depends on the planned memory.

    Raises  UsageError if this kind is not possible for this run or this number of machines
    """
    kind = config.parallel.kind
    if world.size == 1:
        return ONE_PROCESS
    if config.adapter.serve_as is not None:
        raise UsageError(
            f"adapter.serve_as: {config.adapter.serve_as} with {world.size} processes: this was not"
            " tested",
            fix="one process, or leave adapter.serve_as out",
        )
    if kind in (AUTO, REPLICATE):
        if kind == AUTO:
            return None
        return Parallel(REPLICATE, "parallel.kind")
    if reason := sharing_blocker(config):
        raise UsageError(
            f"parallel.kind: {kind} with {reason}",
            fix="remove that setting, or parallel.kind: replicate",
        )
    if kind == SHARD:
        return Parallel(SHARD, "parallel.kind")
    if world.nodes == 1 or world.nodes == world.size or world.size % world.nodes:
        if world.nodes == 1:
            reason = "one machine"
        else:
            reason = f"{world.nodes} machines with {world.size} processes"
        raise UsageError(
            "parallel.kind: hybrid shares the model between the processes of each of several"
            f" machines, and this run has {reason}",
            fix="parallel.kind: shard",
        )
    return Parallel(HYBRID, "parallel.kind", world.nodes)


_WHOLE_WEIGHT_OPTIMIZERS = {
    **dict.fromkeys(
        EIGHT_BIT_OPTIMIZERS, "its states have a scale every 256 elements of a whole weight"
    ),
    "lion": "bitsandbytes' kernel takes no part of a weight",
    "muon": "it makes whole matrices orthogonal",
    "adafactor": "its states are means of whole rows and columns",
    "prodigy": "its rate follows from sums over all weights",
}


def sharing_blocker(config: RunConfig) -> str | None:
    """If a setting of the configuration does not allow the processes to share the model, returns
    this setting with the reason. Otherwise returns None.
    """
    adapter = config.adapter
    optimizer = config.train.optimizer
    cases = (
        (
            config.model.offload == BLOCKS,
            f"{OFFLOAD_SETTING}: a shared model gathers its weights from the other devices",
        ),
        (
            optimizer in _WHOLE_WEIGHT_OPTIMIZERS,
            f"train.optimizer: {optimizer}: {_WHOLE_WEIGHT_OPTIMIZERS.get(optimizer)}",
        ),
        (
            adapter.start in SUBTRACTED_STARTS,
            f"adapter.start: {adapter.start}: it is subtracted from whole weights",
        ),
        (adapter.text_encoders, "adapter.text_encoders: sharing them is not supported"),
        (adapter.train_tokens, "adapter.train_tokens: they are rows of a whole embedding"),
        (config.train.ema is not None, "train.ema: averages of shared weights are not offered yet"),
    )
    return next((reason for applies, reason in cases if applies), None)


def choose_parallel(task: Task, device_setup: DeviceSetup, world: World) -> Parallel:
    """Returns the configured kind of parallelism. For `auto`, the first process plans the memory of
    a step with the whole model and decides, and all other processes follow its decision.
    """
    config = task.config
    precision = device_setup.resolved.precision
    device = device_setup.device
    configured = configured_parallel(config, world)
    if configured is not None:
        return configured

    def decide() -> list[str]:
        model_outline = task.outline_model(precision, device_type=device.type)
        available = available_memory(device_setup.hardware.memory, device)

        def peak() -> int:
            _, plan = planned_checkpointing(
                task,
                device_setup,
                model_outline,
                task.outline_largest_step(precision),
                available=available,
                overhead=0,
            )
            return plan.peak

        parallel = choose_by_plan(
            task.max_step_bytes(model_outline.model, precision), available, peak, config=config
        )
        return [parallel.kind, parallel.reason]

    kind, reason = world.run_on_first(decide)
    return Parallel(kind, reason)


def choose_by_plan(
    upper_bound: int, available: int, peak: Callable[[], int], *, config: RunConfig
) -> Parallel:
    """Returns the choice for `auto`. If the whole model fits into the memory of a process, each
    process gets the whole model, because the processes then exchange the least data.

    upper_bound  an upper bound on the bytes that a process needs
    available    the bytes that its device has; 0 if unknown
    peak         a function that plans the bytes that a process needs; it is called only if
                 `upper_bound` is more than half of `available`
    """
    if not available:
        return Parallel(REPLICATE, "auto: the device's memory is unknown")
    if upper_bound <= available // 2:
        return Parallel(
            REPLICATE,
            f"auto: a process cannot take more than {format_binary_bytes(upper_bound)} of {format_binary_bytes(available)}",
        )
    required = peak()
    if required <= memory_limit(available):
        return Parallel(
            REPLICATE,
            f"auto: a process takes {format_binary_bytes(required)} of {format_binary_bytes(available)}",
        )
    reason = f"auto: the whole model would take {format_binary_bytes(required)} of {format_binary_bytes(available)}"
    if blocker := sharing_blocker(config):
        return Parallel(REPLICATE, f"{reason}, and is not shared because of {blocker}")
    return Parallel(SHARD, reason)
