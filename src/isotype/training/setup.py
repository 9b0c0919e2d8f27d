"""Prepares a run from its configuration: device, precision, data, how processes share the work,
model, recomputation, optimizer.

`prepare_data` is the part that needs no weights; `run` and `plan` both begin with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config.kind import DIFFUSION, kind_of
from ..config.schema import AdapterSection, RunConfig, bytes_of
from ..distributed.agree import fingerprint_of_weights
from ..distributed.rank import Batching
from ..distributed.shard import Sharding, keep_part, mesh_of, part_of
from ..distributed.world import ALONE, World
from ..environment.hardware import Hardware, detect
from ..errors import UsageError, refuse_where
from ..finding import Finding, Severity
from ..model.build import resolve_precision
from ..model.starts import OFF_THE_BASE
from ..observe import Observation, Observer
from ..optimize import Manifest
from ..precision.accumulate import GradientAccumulator
from ..precision.precision import EIGHT_BIT_OPTIMIZERS
from ..precision.resolution import Resolved
from ..runs.checkpoint.snapshot import seed_generators, seed_of_rank
from ..wording import format_binary_bytes
from .base import fingerprint_of_base
from .memory.blocks import (
    BLOCKS,
    KEY,
    check_offload,
    effective_train_settings,
    get_frozen_blocks,
    refuse_without_host_memory,
)
from .memory.device import (
    PLAN_TOLERANCE,
    available_memory,
    choose_checkpointing_by_plan,
    overhead_memory,
    return_freed_blocks,
)
from .memory.plan import MemoryPlan, plan_process_memory
from .memory.recomputation import (
    AUTO,
    NONE,
    Checkpointing,
    apply_checkpointing,
    check_settings,
    checkpointable_layers,
    configured_checkpointing,
)
from .optimizer import build_optimizer, check_optimizer
from .schedule import RunSchedule
from .step import Stepper
from .task import Batch, Outline, Task

_CHECKPOINTING = "train.gradient_checkpointing"
REPLICATE = "replicate"
SHARD = "shard"
HYBRID = "hybrid"


@dataclass(frozen=True)
class Parallel:
    """kind: replicate, shard or hybrid; `nodes`: machines that each have the whole model, where the
    processes of one share it.
    """

    kind: str
    reason: str = ""
    nodes: int = 1

    @property
    def shares(self) -> bool:
        return self.kind != REPLICATE

    def parts(self, size: int) -> int:
        """How many of `size` processes share a model."""
        return size // self.nodes if self.shares else 1

    def __str__(self) -> str:
        if self.reason:
            return f"{self.kind} ({self.reason})"
        return self.kind


ONE_PROCESS = Parallel(REPLICATE)


@dataclass
class DeviceSetup:
    """The parts of a run that are prepared before a model is loaded."""

    hardware: Hardware
    device: torch.device
    resolved: Resolved


@dataclass
class Prepared(DeviceSetup):
    """Everything that the loop needs, except its own state."""

    model: nn.Module
    manifest: Manifest
    stepper: Stepper
    checkpointing: Checkpointing
    batching: Batching
    sharding: Sharding | None = None
    fingerprint: str = ""  # of the weights, where there are several processes
    parallel: Parallel = ONE_PROCESS
    base: str = ""  # a fingerprint of the frozen weights, by which a resume compares them


def prepare_data(
    task: Task,
    sources: Mapping[str, str],
    hardware: Hardware | None = None,
    *,
    world: World = ALONE,
) -> DeviceSetup:
    """Prepares device and precision, then the data. Cheap checks come first, so that a mistake is
    found in seconds. Raises UsageError.

    hardware  prepares for this device instead of the one in this machine
    """
    config = task.config
    hardware = hardware or detect(config.model.device)
    if hardware.kind == "cpu":  # the processes of a machine share its memory
        hardware = replace(hardware, memory=hardware.memory // world.local_size)
    device = torch.device("cuda" if hardware.kind in ("cuda", "rocm") else "cpu")
    check_settings(config.train, device_type=device.type)
    check_offload(config, device_type=device.type)
    check_adapters(config)
    check_optimizer(config, sources, device_type=device.type)
    resolved = resolve_precision(config, sources, hardware, task.roles)
    task.check(resolved.precision)
    seed_everything(config.train.seed, deterministic=config.train.deterministic)
    world.at(0, "reading the data")
    world.first_before_others(task.load_data)  # what it tokenised, the others find in the cache
    return DeviceSetup(hardware, device, resolved)


def check_adapters(config: RunConfig) -> None:
    """Raises  UsageError for adapters on the way that would not be written."""
    run = config.run
    adapter = config.adapter
    no_effect = "has no effect with adapter.kind: none"
    defaults = AdapterSection()

    def changed_keys(*keys: str) -> list[str]:
        return [key for key in keys if getattr(adapter, key) != getattr(defaults, key)]

    new_adapter_keys = changed_keys(
        "dora", "rank_pattern", "alpha_pattern", "start", "train_tokens"
    )
    is_lokr = adapter.kind == "lokr"
    refuse_where(
        (
            run.adapters_every is not None and adapter.kind == "none",
            f"run.adapters_every: {no_effect}",
            "run.save_every: checkpoints hold every weight",
        ),
        (
            run.adapters_keep is not None and run.adapters_every is None,
            "run.adapters_keep: has no effect without run.adapters_every",
            "run.adapters_every: 500",
        ),
        *(
            (
                adapter.kind == "none",
                f"adapter.{key}: {no_effect}",
                f"remove adapter.{key}, or adapter.kind: lora",
            )
            for key in [*new_adapter_keys, *changed_keys("plus", "start_from")]
        ),
        *(
            (
                adapter.start_from is not None,
                (
                    f"adapter.{key}: has no effect with adapter.start_from, whose adapter goes on"
                    " as it is"
                ),
                f"remove adapter.{key}",
            )
            for key in new_adapter_keys
        ),
        (
            is_lokr and kind_of(config) != DIFFUSION,
            "adapter.kind: lokr is offered for pictures",
            "adapter.kind: lora",
        ),
        *(
            (
                is_lokr,
                f"adapter.{key}: has no effect with adapter.kind: lokr",
                f"remove adapter.{key}, or adapter.kind: lora",
            )
            for key in changed_keys("dropout", "rslora", "dora", "plus", "start")
        ),
        (
            not is_lokr and adapter.factor is not None,
            f"adapter.factor: has no effect with adapter.kind: {adapter.kind}",
            "remove adapter.factor, or adapter.kind: lokr",
        ),
        (
            run.adapter_format == "comfyui" and adapter.dora,
            "adapter.dora: not offered with run.adapter_format: comfyui",
            "remove adapter.dora, or run.adapter_format",
        ),
        *(
            (
                config.train.optimizer == "prodigy",
                f"adapter.{key}: prodigy has one rate for all weights",
                f"remove adapter.{key}, or another train.optimizer",
            )
            for key in changed_keys("plus", "text_encoder_rate")
        ),
    )


def prepare(task: Task, sources: Mapping[str, str], folder: Path, world: World = ALONE) -> Prepared:
    """folder  where the task keeps a base model that it makes itself. Raises UsageError."""
    config = task.config
    batching = Batching.of(config.train, rank=world.rank, size=world.size)
    device_setup = prepare_data(task, sources, world=world)
    precision = device_setup.resolved.precision
    parallel = choose_parallel(task, device_setup, world)
    world.at(0, "encoding the data")
    # what it put into the cache, the others find there
    world.first_before_others(lambda: task.encode(device_setup.device))
    world.at(0, "building the model")
    if config.model.offload == BLOCKS:
        found = get_frozen_blocks(
            task.outline(precision, device_type=device_setup.device.type).model
        )
        needed = 0 if found is None else sum(block.bytes for block in found.blocks)
        refuse_without_host_memory(needed, detect("cpu").memory, world.local_size)
    with world.exchanging():
        if parallel.shares:
            mesh = mesh_of(world, device_setup.device, nodes=parallel.nodes)
        else:
            mesh = None

    fingerprints, bases = [""], [""]

    def look(model: nn.Module) -> None:
        if world.size > 1:
            fingerprints.append(fingerprint_of_weights(model))
        bases.append(fingerprint_of_base(model, precision, config.adapter))

    part = None if mesh is None else part_of(mesh, look)

    def build() -> tuple[nn.Module, Manifest]:
        return task.build_model(precision, device_setup.device, folder, part)

    def complete() -> tuple[nn.Module, Manifest, Checkpointing, list[nn.Module]]:
        if config.model.init == "random":
            model, manifest = world.first_before_others(build)
        else:
            model, manifest = build()
        checkpointing = choose_checkpointing(
            task,
            device_setup,
            model,
            parts=parallel.parts(world.size),
            source=sources.get(_CHECKPOINTING, ""),
        )
        apply_checkpointing(model, checkpointing)
        if part is None:
            units = []
        else:
            units = keep_part(model, mesh, part, reduce=precision.reduce)
        return model, manifest, checkpointing, units

    # a model whose weights must be held whole (4-bit ones, files of several dtypes) is in a
    # machine's memory once
    if mesh is None:
        model, manifest, checkpointing, units = complete()
        look(model)
    else:
        model, manifest, checkpointing, units = world.in_turn(complete)
    with world.exchanging():
        if mesh is None:
            sharding = None
        else:
            sharding = Sharding(model, units, world, mesh=mesh, replicas=parallel.nodes)
    accumulator = GradientAccumulator(
        model.parameters(),
        dtype=precision.grads,
        reduce=precision.reduce,
        summed=sharding,
        processes=world if sharding is None else None,
    )
    optimizer = build_optimizer(
        model,
        config.train,
        precision,
        accumulator.gradient,
        plus=config.adapter.plus,
        text_rate=config.adapter.text_encoder_rate,
    )
    # building drew from the generators by a path that a resumed run may not take again
    seed_everything(config.train.seed, deterministic=config.train.deterministic)
    if not world.first:
        seed_of_rank(config.train.seed, 0, world.rank)

    loss_sum = partial(task.loss_sum, dtype=precision.loss)
    stepper = Stepper(
        model, optimizer, accumulator, precision, config.train, loss_sum, world, sharding
    )
    return Prepared(
        device_setup.hardware,
        device_setup.device,
        device_setup.resolved,
        model,
        manifest,
        stepper,
        checkpointing,
        batching,
        sharding,
        fingerprints[-1],
        parallel,
        bases[-1],
    )


def configured_parallel(config: RunConfig, world: World) -> Parallel | None:
    """What the configuration says, or None where it leaves that to the plan.

    Raises  UsageError for a kind that this run or this number of machines cannot have
    """
    kind = config.parallel.kind
    if world.size == 1:
        return ONE_PROCESS
    if kind in (AUTO, REPLICATE):
        if kind == AUTO:
            return None
        return Parallel(REPLICATE, "parallel.kind")
    if reason := sharing_blocker(config):
        raise UsageError(
            f"parallel.kind: {kind} with {reason}",
            fix="leave that away, or parallel.kind: replicate",
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
    """The setting with which a model cannot be shared, and why; or None."""
    adapter = config.adapter
    optimizer = config.train.optimizer
    cases = (
        (
            config.model.offload == BLOCKS,
            f"{KEY}: a shared model gathers its weights from the other devices",
        ),
        (
            optimizer in _WHOLE_WEIGHT_OPTIMIZERS,
            f"train.optimizer: {optimizer}: {_WHOLE_WEIGHT_OPTIMIZERS.get(optimizer)}",
        ),
        (
            adapter.start in OFF_THE_BASE,
            f"adapter.start: {adapter.start}: it is taken off whole weights",
        ),
        (adapter.text_encoders, "adapter.text_encoders: shares of them were never tried"),
        (adapter.train_tokens, "adapter.train_tokens: they are rows of a whole embedding"),
        (config.train.ema is not None, "train.ema: averages of shared weights are not offered yet"),
    )
    return next((reason for applies, reason in cases if applies), None)


def choose_parallel(task: Task, device_setup: DeviceSetup, world: World) -> Parallel:
    """The configured kind. `auto` plans the step as one process would compute it. All processes
    take what the first one decides.
    """
    config = task.config
    precision = device_setup.resolved.precision
    device = device_setup.device
    configured = configured_parallel(config, world)
    if configured is not None:
        return configured

    def decide() -> list[str]:
        outline = task.outline(precision, device_type=device.type)
        available = available_memory(device_setup.hardware.memory, device)

        def peak() -> int:
            return planned_checkpointing(
                task, device_setup, outline, available=available, overhead=0
            )[1].peak

        parallel = choose_by_plan(
            task.max_step_bytes(outline.model, precision), available, peak, config=config
        )
        return [parallel.kind, parallel.reason]

    kind, reason = world.first_does(decide)
    return Parallel(kind, reason)


def choose_by_plan(
    upper_bound: int, available: int, peak: Callable[[], int], *, config: RunConfig
) -> Parallel:
    """What `auto` takes: the whole model in each process where it fits, since a step then exchanges
    least.

    upper_bound  of a process's bytes
    peak         the planned bytes, asked for only where the bound is near the `available` bytes
    """
    if not available:
        return Parallel(REPLICATE, "auto: the device's memory is unknown")
    if upper_bound <= available // 2:
        return Parallel(
            REPLICATE,
            f"auto: a process cannot take more than {format_binary_bytes(upper_bound)} of {format_binary_bytes(available)}",
        )
    required = peak()
    if required <= available * (1 - PLAN_TOLERANCE):
        return Parallel(
            REPLICATE,
            f"auto: a process takes {format_binary_bytes(required)} of {format_binary_bytes(available)}",
        )
    reason = f"auto: the whole model would take {format_binary_bytes(required)} of {format_binary_bytes(available)}"
    if blocker := sharing_blocker(config):
        return Parallel(REPLICATE, f"{reason}, and is not shared because of {blocker}")
    return Parallel(SHARD, reason)


def choose_checkpointing(
    task: Task, device_setup: DeviceSetup, model: nn.Module, *, parts: int = 1, source: str = ""
) -> Checkpointing:
    """The configured choice. `auto` plans the step on the longest rows, unless an upper bound is
    far below the available memory.

    parts   how many processes share the model
    source  of the setting; a resumed run's is the reason for which `auto` chose it in the part
            before
    """
    train = effective_train_settings(task.config)
    device = device_setup.device
    precision = device_setup.resolved.precision
    available = available_memory(device_setup.hardware.memory, device)
    overhead = overhead_memory(model, device)
    upper_bound = task.max_step_bytes(model, precision) + overhead
    is_near = upper_bound > available // 2
    if is_near and available and device.type == "cpu":
        return_freed_blocks()  # else the process would grow past the plan
    if train.gradient_checkpointing != AUTO:
        chosen = _configured_checkpointing(model, task.config)
        if source.startswith(f"{AUTO}: "):
            return replace(chosen, reason=source)
        return chosen
    target = None if train.memory is None else bytes_of(train.memory)
    if not is_near and (target is None or upper_bound - overhead <= target):
        return Checkpointing(
            NONE,
            reason=f"auto: the step cannot take more than {format_binary_bytes(upper_bound)} of {format_binary_bytes(available)}",
        )
    outline = task.outline(precision, device_type=device.type)
    checkpointing, _ = planned_checkpointing(
        task, device_setup, outline, available=available, overhead=overhead, parts=parts
    )
    return checkpointing


def _configured_checkpointing(model: nn.Module, config: RunConfig) -> Checkpointing:
    chosen = configured_checkpointing(model, effective_train_settings(config))
    if config.train.gradient_checkpointing == AUTO:
        return replace(chosen, reason=f"{AUTO}: {KEY}")
    return chosen


def planned_checkpointing(
    task: Task,
    device_setup: DeviceSetup,
    outline: Outline,
    *,
    available: int,
    overhead: int,
    parts: int = 1,
) -> tuple[Checkpointing, MemoryPlan]:
    """The choice of recomputation on a device with `available` bytes, of which `overhead` are in use, and
    the memory plan of its step.

    parts  how many processes share the model
    """
    train, precision, largest = (
        effective_train_settings(task.config),
        device_setup.resolved.precision,
        task.step_outline(device_setup.resolved.precision),
    )

    earlier: MemoryPlan | None = None

    def simulate(checkpointing: Checkpointing) -> MemoryPlan:
        nonlocal earlier
        plan = plan_process_memory(
            outline,
            train,
            precision,
            largest,
            checkpointing=checkpointing,
            device_type=device_setup.device.type,
            parts=parts,
            earlier=earlier,
        )
        earlier = earlier or (None if plan.not_simulated else plan)
        return plan

    if train.gradient_checkpointing != AUTO:
        checkpointing = _configured_checkpointing(outline.model, task.config)
        return checkpointing, simulate(checkpointing)
    layers = len(checkpointable_layers(outline.model))
    target = None if train.memory is None else bytes_of(train.memory)
    return choose_checkpointing_by_plan(
        simulate,
        layers=layers,
        available=available,
        overhead=overhead,
        device_type=device_setup.device.type,
        target=target,
    )


def seed_everything(seed: int, *, deterministic: bool) -> None:
    """Seeds all generators; `deterministic` also forbids nondeterministic algorithms."""
    seed_generators(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A prepared run. `resuming`: it continues from a checkpoint, so that some of its files already
    exist.

    task         a `training.task.Task`; of an attached trainer what the checks ask of one
    prepared     of an attached trainer the parts that the checks use
    micro_batch  rows of a forward pass; by default train.batch_size
    observer     watches each rehearsal; `observations` has what it saw, and `violation_severity` is how severe a
                 violation is
    """

    config: RunConfig
    task: Any
    prepared: Prepared
    schedule: RunSchedule
    folder: Path
    resuming: bool = False
    micro_batch: int | None = None
    observer: Observer | None = None
    violation_severity: Severity = Severity.ERROR
    observations: dict[str, Observation] = field(default_factory=dict)

    @contextmanager
    def watch(self, name: str, role: str = "compute") -> Iterator[None]:
        """Judges what runs in this block. One that raises was not watched."""
        if self.observer is None:
            yield
            return
        with self.observer.watch(0, role=role) as observation:
            yield
        observation.violations = [
            replace(finding, severity=self.violation_severity) for finding in observation.violations
        ]
        self.observations[name] = observation

    def violations(self, name: str) -> list[Finding]:
        return self.observations[name].violations if name in self.observations else []

    @cached_property
    def longest_rows(self) -> Sequence[Any]:
        """The rows of the largest batch that the feed could return."""
        rows: Sequence[Any] = self.task.largest_rows(
            self.micro_batch or self.config.train.batch_size
        )
        return rows

    def make_batch(self, rows: Sequence[Any]) -> Batch:
        batch: Batch = self.task.collate(rows)
        return batch.to(self.prepared.device)
