"""Prepares a run from its configuration: device, precision, data, how processes share the work,
model, recomputation, optimizer.

`settle` is the part that needs no weights; `run` and `plan` both begin with it.
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
from ..precision.resolve import Resolved
from ..runs.checkpoint.snapshot import seed_generators, seed_of_rank
from ..wording import format_binary_bytes
from .base import fingerprint_of_base
from .memory.blocks import (
    BLOCKS,
    KEY,
    blocks_of,
    check_offload,
    recomputing,
    refuse_without_host_memory,
)
from .memory.device import (
    WITHIN,
    auto_checkpointing,
    memory_there,
    other_memory,
    return_freed_blocks,
)
from .memory.plan import MemoryPlan, plan_part
from .memory.recomputation import (
    AUTO,
    NONE,
    Checkpointing,
    apply_checkpointing,
    as_configured,
    check_settings,
    checkpointable,
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
class Basis:
    """The parts of a run that are prepared before a model is loaded."""

    hardware: Hardware
    device: torch.device
    resolved: Resolved


@dataclass
class Prepared(Basis):
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


def settle(
    task: Task,
    sources: Mapping[str, str],
    hardware: Hardware | None = None,
    *,
    world: World = ALONE,
) -> Basis:
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
    return Basis(hardware, device, resolved)


def check_adapters(config: RunConfig) -> None:
    """Raises  UsageError for adapters on the way that would not be written."""
    run = config.run
    adapter = config.adapter
    none = "has no effect with adapter.kind: none"
    unset = AdapterSection()

    def given(*keys: str) -> list[str]:
        return [key for key in keys if getattr(adapter, key) != getattr(unset, key)]

    of_new_ones = given("dora", "rank_pattern", "alpha_pattern", "start", "train_tokens")
    lokr = adapter.kind == "lokr"
    refuse_where(
        (
            run.adapters_every is not None and adapter.kind == "none",
            f"run.adapters_every: {none}",
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
                f"adapter.{key}: {none}",
                f"remove adapter.{key}, or adapter.kind: lora",
            )
            for key in [*of_new_ones, *given("plus", "start_from")]
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
            for key in of_new_ones
        ),
        (
            lokr and kind_of(config) != DIFFUSION,
            "adapter.kind: lokr is offered for pictures",
            "adapter.kind: lora",
        ),
        *(
            (
                lokr,
                f"adapter.{key}: has no effect with adapter.kind: lokr",
                f"remove adapter.{key}, or adapter.kind: lora",
            )
            for key in given("dropout", "rslora", "dora", "plus", "start")
        ),
        (
            not lokr and adapter.factor is not None,
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
            for key in given("plus", "text_encoder_rate")
        ),
    )


def prepare(task: Task, sources: Mapping[str, str], folder: Path, world: World = ALONE) -> Prepared:
    """folder  where the task keeps a base model that it makes itself. Raises UsageError."""
    config = task.config
    batching = Batching.of(config.train, rank=world.rank, size=world.size)
    basis = settle(task, sources, world=world)
    precision = basis.resolved.precision
    parallel = choose_parallel(task, basis, world)
    world.at(0, "encoding the data")
    # what it put into the cache, the others find there
    world.first_before_others(lambda: task.encode(basis.device))
    world.at(0, "building the model")
    if config.model.offload == BLOCKS:
        found = blocks_of(task.outline(precision, device_type=basis.device.type).model)
        needed = 0 if found is None else sum(block.bytes for block in found.blocks)
        refuse_without_host_memory(needed, detect("cpu").memory, world.local_size)
    with world.exchanging():
        if parallel.shares:
            mesh = mesh_of(world, basis.device, nodes=parallel.nodes)
        else:
            mesh = None

    fingerprints, bases = [""], [""]

    def look(model: nn.Module) -> None:
        if world.size > 1:
            fingerprints.append(fingerprint_of_weights(model))
        bases.append(fingerprint_of_base(model, precision, config.adapter))

    part = None if mesh is None else part_of(mesh, look)

    def build() -> tuple[nn.Module, Manifest]:
        return task.build_model(precision, basis.device, folder, part)

    def complete() -> tuple[nn.Module, Manifest, Checkpointing, list[nn.Module]]:
        if config.model.init == "random":
            model, manifest = world.first_before_others(build)
        else:
            model, manifest = build()
        checkpointing = choose_checkpointing(
            task,
            basis,
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
        basis.hardware,
        basis.device,
        basis.resolved,
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


def parallel_as_configured(config: RunConfig, world: World) -> Parallel | None:
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
    if why := why_not_shared(config):
        raise UsageError(
            f"parallel.kind: {kind} with {why}", fix="leave that away, or parallel.kind: replicate"
        )
    if kind == SHARD:
        return Parallel(SHARD, "parallel.kind")
    if world.nodes == 1 or world.nodes == world.size or world.size % world.nodes:
        if world.nodes == 1:
            why = "one machine"
        else:
            why = f"{world.nodes} machines with {world.size} processes"
        raise UsageError(
            "parallel.kind: hybrid shares the model between the processes of each of several"
            f" machines, and this run has {why}",
            fix="parallel.kind: shard",
        )
    return Parallel(HYBRID, "parallel.kind", world.nodes)


_OF_WHOLE_WEIGHTS = {
    **dict.fromkeys(
        EIGHT_BIT_OPTIMIZERS, "its states have a scale every 256 elements of a whole weight"
    ),
    "lion": "bitsandbytes' kernel takes no part of a weight",
    "muon": "it makes whole matrices orthogonal",
    "adafactor": "its states are means of whole rows and columns",
    "prodigy": "its rate follows from sums over all weights",
}


def why_not_shared(config: RunConfig) -> str | None:
    """The setting with which a model cannot be shared, and why; or None."""
    adapter = config.adapter
    optimizer = config.train.optimizer
    cases = (
        (
            config.model.offload == BLOCKS,
            f"{KEY}: a shared model gathers its weights from the other devices",
        ),
        (
            optimizer in _OF_WHOLE_WEIGHTS,
            f"train.optimizer: {optimizer}: {_OF_WHOLE_WEIGHTS.get(optimizer)}",
        ),
        (
            adapter.start in OFF_THE_BASE,
            f"adapter.start: {adapter.start}: it is taken off whole weights",
        ),
        (adapter.text_encoders, "adapter.text_encoders: shares of them were never tried"),
        (adapter.train_tokens, "adapter.train_tokens: they are rows of a whole embedding"),
        (config.train.ema is not None, "train.ema: averages of shared weights are not offered yet"),
    )
    return next((why for is_so, why in cases if is_so), None)


def choose_parallel(task: Task, basis: Basis, world: World) -> Parallel:
    """The configured kind. `auto` plans the step as one process would compute it. All processes
    take what the first one decides.
    """
    config = task.config
    precision = basis.resolved.precision
    device = basis.device
    given = parallel_as_configured(config, world)
    if given is not None:
        return given

    def decide() -> list[str]:
        made = task.outline(precision, device_type=device.type)
        has = memory_there(basis.hardware.memory, device)

        def peak() -> int:
            return planned_checkpointing(task, basis, made, has=has, besides=0)[1].peak

        found = by_plan(task.most_bytes(made.model, precision), has, peak, config=config)
        return [found.kind, found.reason]

    kind, reason = world.first_does(decide)
    return Parallel(kind, reason)


def by_plan(most: int, has: int, peak: Callable[[], int], *, config: RunConfig) -> Parallel:
    """What `auto` takes: the whole model in each process where it fits, since a step then exchanges
    least.

    most  an upper bound of a process's bytes
    peak  the planned bytes, asked for only where the bound is near what the device `has`
    """
    if not has:
        return Parallel(REPLICATE, "auto: the device's memory is unknown")
    if most <= has // 2:
        return Parallel(
            REPLICATE,
            f"auto: a process cannot take more than {format_binary_bytes(most)} of {format_binary_bytes(has)}",
        )
    needs = peak()
    if needs <= has * (1 - WITHIN):
        return Parallel(
            REPLICATE,
            f"auto: a process takes {format_binary_bytes(needs)} of {format_binary_bytes(has)}",
        )
    why = f"auto: the whole model would take {format_binary_bytes(needs)} of {format_binary_bytes(has)}"
    if cannot := why_not_shared(config):
        return Parallel(REPLICATE, f"{why}, and is not shared because of {cannot}")
    return Parallel(SHARD, why)


def choose_checkpointing(
    task: Task, basis: Basis, model: nn.Module, *, parts: int = 1, source: str = ""
) -> Checkpointing:
    """The configured choice. `auto` plans the step on the longest rows, unless an upper bound is
    far below the available memory.

    parts   how many processes share the model
    source  of the setting; a resumed run's is the reason for which `auto` chose it in the part
            before
    """
    train = recomputing(task.config)
    device = basis.device
    precision = basis.resolved.precision
    has = memory_there(basis.hardware.memory, device)
    besides = other_memory(model, device)
    most = task.most_bytes(model, precision) + besides
    near = most > has // 2
    if near and has and device.type == "cpu":
        return_freed_blocks()  # else the process would grow past the plan
    if train.gradient_checkpointing != AUTO:
        chosen = _as_configured(model, task.config)
        if source.startswith(f"{AUTO}: "):
            return replace(chosen, reason=source)
        return chosen
    target = None if train.memory is None else bytes_of(train.memory)
    if not near and (target is None or most - besides <= target):
        return Checkpointing(
            NONE,
            reason=f"auto: the step cannot take more than {format_binary_bytes(most)} of {format_binary_bytes(has)}",
        )
    made = task.outline(precision, device_type=device.type)
    found, _ = planned_checkpointing(task, basis, made, has=has, besides=besides, parts=parts)
    return found


def _as_configured(model: nn.Module, config: RunConfig) -> Checkpointing:
    chosen = as_configured(model, recomputing(config))
    if config.train.gradient_checkpointing == AUTO:
        return replace(chosen, reason=f"{AUTO}: {KEY}")
    return chosen


def planned_checkpointing(
    task: Task, basis: Basis, made: Outline, *, has: int, besides: int, parts: int = 1
) -> tuple[Checkpointing, MemoryPlan]:
    """The choice of recomputation on a device with `has` bytes, of which `besides` are in use, and
    the memory plan of its step.

    parts  how many processes share the model
    """
    train, precision, largest = (
        recomputing(task.config),
        basis.resolved.precision,
        task.step_outline(basis.resolved.precision),
    )

    earlier: MemoryPlan | None = None

    def simulate(checkpointing: Checkpointing) -> MemoryPlan:
        nonlocal earlier
        found = plan_part(
            made,
            train,
            precision,
            largest,
            checkpointing=checkpointing,
            device_type=basis.device.type,
            parts=parts,
            earlier=earlier,
        )
        earlier = earlier or (None if found.not_simulated else found)
        return found

    if train.gradient_checkpointing != AUTO:
        checkpointing = _as_configured(made.model, task.config)
        return checkpointing, simulate(checkpointing)
    layers = len(checkpointable(made.model))
    target = None if train.memory is None else bytes_of(train.memory)
    return auto_checkpointing(
        simulate,
        layers=layers,
        has=has,
        besides=besides,
        device_type=basis.device.type,
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
    observer     watches each rehearsal; `seen` has what it saw, and `violation` is how severe a
                 violation is
    """

    config: RunConfig
    task: Any
    prepared: Prepared
    plan: RunSchedule
    folder: Path
    resuming: bool = False
    micro_batch: int | None = None
    observer: Observer | None = None
    violation: Severity = Severity.ERROR
    seen: dict[str, Observation] = field(default_factory=dict)

    @contextmanager
    def watched(self, what: str, role: str = "compute") -> Iterator[None]:
        """Judges what runs in this block. One that raises was not watched."""
        if self.observer is None:
            yield
            return
        with self.observer.watch(0, role=role) as seen:
            yield
        seen.violations = [replace(finding, severity=self.violation) for finding in seen.violations]
        self.seen[what] = seen

    def violations(self, what: str) -> list[Finding]:
        return self.seen[what].violations if what in self.seen else []

    @cached_property
    def longest_rows(self) -> Sequence[Any]:
        """The rows of the largest batch that the feed could return."""
        rows: Sequence[Any] = self.task.largest(self.micro_batch or self.config.train.batch_size)
        return rows

    def batch_of(self, rows: Sequence[Any]) -> Batch:
        batch: Batch = self.task.collate(rows)
        return batch.to(self.prepared.device)
