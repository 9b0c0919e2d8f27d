"""Prepares a run from its configuration. It first prepares the device, the precision and the data.
Then it decides how the processes share the work, builds the model, decides which layers are
recomputed, and builds the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..config.schema import AdapterSection, RunConfig, TrainSection
from ..distributed.agree import fingerprint_of_weights
from ..distributed.rank import Batching
from ..distributed.shard import Sharding, create_mesh, keep_part, local_part_of_mesh
from ..distributed.world import ALONE, World
from ..environment.hardware import detect
from ..errors import RunError
from ..finding import Finding, Severity
from ..observe import Observation, Observer
from ..optimize import Manifest
from ..precision.accumulate import GradientAccumulator
from ..precision.apply import is_quantised
from ..precision.precision import Precision
from ..precision.resolution import Resolved
from ..runs.checkpoint.snapshot import seed_rank
from ..runs.mapped_files import release_mapped_pages
from .base import fingerprint_of_base
from .device_setup import DeviceSetup, prepare_data, seed_everything
from .memory.blocks import BLOCKS, get_frozen_blocks, refuse_without_host_memory
from .memory.choice import choose_checkpointing
from .memory.recomputation import Checkpointing, apply_checkpointing
from .parallel import ONE_PROCESS, Parallel, choose_parallel
from .schedule import RunSchedule
from .setting_names import RUN_FILE_NAMES, SettingNames
from .step import LossScale, Stepper, assemble_stepper, peak_memory
from .task import Batch, Task


@dataclass
class Prepared(DeviceSetup):
    """Everything that the training loop needs, except for the loop's own state.

    manifest       which op runs in which module of the model
    stepper        computes the optimizer steps
    checkpointing  the kind of gradient checkpointing, with the reason for it
    batching       which micro-batches this process computes in a step
    sharding       how the processes share the model; None if each has the whole model
    parallel       how the processes share the work, with the reason for it
    """

    model: nn.Module
    manifest: Manifest
    stepper: Stepper
    checkpointing: Checkpointing
    batching: Batching
    sharding: Sharding | None = None
    weights_fingerprint: str = ""  # of all weights; empty for one process
    parallel: Parallel = ONE_PROCESS
    base_fingerprint: str = ""  # the fingerprint of the frozen weights, which a resume compares


def prepare(task: Task, sources: Mapping[str, str], folder: Path, world: World = ALONE) -> Prepared:
    """Prepares everything that a run needs before its first step. Raises UsageError.

    sources  for each key of the configuration, the place where its value was set
    folder   where the task stores a base model that it creates itself
    """
    train = task.config.train
    batching = Batching.plan_step(train, rank=world.rank, size=world.size)
    device_setup = prepare_data(task, sources, world=world)
    parallel = choose_parallel(task, device_setup, world)
    encode_data(task, device_setup, world)
    if device_setup.device.type == "cpu":
        device_setup.process_bytes = peak_memory(device_setup.device)
    world.record_progress(0, "building the model")
    check_host_memory(task, device_setup, world)
    built = build_model(task, sources, device_setup, parallel, folder, world)
    precision = device_setup.resolved.precision
    stepper = assemble_stepper(
        built.model,
        train,
        precision,
        partial(task.loss_sum, dtype=precision.loss),
        adapter=task.config.adapter,
        world=world,
        sharding=built.sharding,
    )
    # building the model drew random numbers, and a resumed run may draw others
    seed_process(train, world)
    return Prepared(
        hardware=device_setup.hardware,
        device=device_setup.device,
        resolved=device_setup.resolved,
        process_bytes=device_setup.process_bytes,
        model=built.model,
        manifest=built.manifest,
        stepper=stepper,
        checkpointing=built.checkpointing,
        batching=batching,
        sharding=built.sharding,
        weights_fingerprint=built.fingerprints.weights,
        parallel=parallel,
        base_fingerprint=built.fingerprints.base,
    )


def encode_data(task: Task, device_setup: DeviceSetup, world: World) -> None:
    """Encodes the data in the first process. The other processes then read the encoded data from
    the cache.
    """
    world.record_progress(0, "encoding the data")
    world.run_on_first_then_others(lambda: task.encode(device_setup.device))


def check_host_memory(task: Task, device_setup: DeviceSetup, world: World) -> None:
    """Raises UsageError if `model.offload: blocks` is set and the blocks do not fit into host
    memory.
    """
    if task.config.model.offload != BLOCKS:
        return
    precision = device_setup.resolved.precision
    model_outline = task.outline_model(precision, device_type=device_setup.device.type)
    frozen_blocks = get_frozen_blocks(model_outline.model)
    block_bytes = 0
    if frozen_blocks is not None:
        block_bytes = sum(block.bytes for block in frozen_blocks.blocks)
    refuse_without_host_memory(block_bytes, detect("cpu").memory, world.local_size)


class WeightFingerprints:
    """Fingerprints of a whole model. The fingerprints are computed before the model is split over
    the processes.

    weights  the fingerprint of all weights, which the processes compare; "" if there is only one
             process
    base     the fingerprint of the frozen weights; a resumed run compares it with the fingerprint
             from its last start
    """

    def __init__(self, precision: Precision, adapter: AdapterSection, world: World) -> None:
        self.weights = ""
        self.base = ""
        self._precision = precision
        self._adapter = adapter
        self._world = world

    def take(self, model: nn.Module) -> None:
        if self._world.size > 1:
            self.weights = fingerprint_of_weights(model)
        self.base = fingerprint_of_base(model, self._precision, self._adapter)


@dataclass(frozen=True)
class BuiltModel:
    """A model that is ready to train.

    manifest       which op runs in which module of the model
    checkpointing  the kind of gradient checkpointing, with the reason for it
    fingerprints   hashes of the weights, which the processes compare
    sharding       how the processes share the model; None if each has the whole model
    """

    model: nn.Module
    manifest: Manifest
    checkpointing: Checkpointing
    fingerprints: WeightFingerprints
    sharding: Sharding | None


@dataclass(frozen=True)
class _LocalModel:
    """The model of this process. If processes share it, `units` are its FSDP units."""

    model: nn.Module
    manifest: Manifest
    checkpointing: Checkpointing
    units: list[nn.Module]


def build_model(
    task: Task,
    sources: Mapping[str, str],
    device_setup: DeviceSetup,
    parallel: Parallel,
    folder: Path,
    world: World,
) -> BuiltModel:
    """Builds the task's model with its adapter, ops, precision and recomputation. If processes
    share the model, builds this process's part of it.
    """
    config = task.config
    precision = device_setup.resolved.precision
    fingerprints = WeightFingerprints(precision, config.adapter, world)
    mesh: Any = None
    part = None
    with world.explain_exchange_errors():
        if parallel.is_shared:
            mesh = create_mesh(world, device_setup.device, nodes=parallel.nodes)
            part = local_part_of_mesh(mesh, fingerprints.take)

    def load() -> tuple[nn.Module, Manifest]:
        return task.build_model(precision, device_setup.device, folder, part)

    def build_local() -> _LocalModel:
        if config.model.init == "random":
            # the first process makes the base, which the others load
            model, manifest = world.run_on_first_then_others(load)
        else:
            model, manifest = load()
        checkpointing = choose_checkpointing(
            task,
            device_setup,
            model,
            parts=parallel.processes_per_model(world.size),
            source=sources.get("train.gradient_checkpointing", ""),
        )
        apply_checkpointing(model, checkpointing)
        units: list[nn.Module] = []
        if part is not None:
            units = keep_part(model, mesh, part, reduce=precision.reduce)
        return _LocalModel(model, manifest, checkpointing, units)

    sharding = None
    if part is None:
        local = build_local()
        fingerprints.take(local.model)
    else:
        # one process after another: a machine's memory then has only one whole model, of those that
        # must be loaded whole (4-bit weights, files of several dtypes)
        local = world.run_sequentially(build_local)
        with world.explain_exchange_errors():
            sharding = Sharding(
                local.model, local.units, world, mesh=mesh, replica_count=parallel.nodes
            )
    if any(is_quantised(parameter) for parameter in local.model.parameters()):
        release_mapped_pages()
    return BuiltModel(local.model, local.manifest, local.checkpointing, fingerprints, sharding)


def seed_process(train: TrainSection, world: World) -> None:
    """Seeds the random generators of this process. Every process except the first adds its rank to
    the seed.
    """
    seed_everything(train.seed, deterministic=train.deterministic)
    if not world.is_first:
        seed_rank(train.seed, 0, world.rank)


class CheckedStepper(Protocol):
    """The part of a `Stepper` that the checks before step 1 use."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    @property
    def accumulator(self) -> GradientAccumulator: ...
    @property
    def loss_scale(self) -> LossScale | None: ...
    @property
    def world(self) -> World: ...
    @property
    def sharding(self) -> Sharding | None: ...
    def accumulate(self, batches: Sequence[Any], /) -> Tensor: ...
    def norm(self) -> float: ...
    def explain_non_finite(
        self, batches: Sequence[Any], *, step: int, quantity: str
    ) -> RunError: ...


class CheckedRun(Protocol):
    """The part of a run that the checks before step 1 use. Both `Prepared` and the run of another
    library's trainer (`attach`) have these attributes.
    """

    @property
    def model(self) -> nn.Module: ...
    @property
    def resolved(self) -> Resolved: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def manifest(self) -> Manifest: ...
    @property
    def stepper(self) -> CheckedStepper: ...


@dataclass
class Trial:
    """The measurements of the trial step before step 1.

    peak_bytes     the peak memory, including the update if the trial step ran one; 0 without a
                   trial step
    batch_seconds  the time of forward and backward on the longest rows; None if it was not measured
    sample_seconds  the estimated time of a round of samples; None if it was not measured
    """

    peak_bytes: int = 0
    batch_seconds: float | None = None
    sample_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class PreflightSubject:
    """The prepared run that the preflight checks.

    task                a `training.task.Task`; for a trainer of another library, an object with
                        those parts of a task that the checks use
    prepared            a `Prepared`, or the run of a trainer of another library
    folder              the folder of the run
    is_resuming         whether the run continues from a checkpoint; if so, some of its files
                        already exist
    micro_batch         the number of rows of a forward pass; by default train.batch_size
    observer            records the dtypes in each trial step, evaluation and sample
    violation_severity  how severe it is if a dtype is not the declared one
    observations        for each trial step, evaluation or sample: its name -> the recorded dtypes
    names               the names that messages use for the settings
    trial               the measurements of the trial step
    """

    config: RunConfig
    task: Any
    prepared: CheckedRun
    schedule: RunSchedule
    folder: Path
    is_resuming: bool = False
    micro_batch: int | None = None
    observer: Observer | None = None
    violation_severity: Severity = Severity.ERROR
    observations: dict[str, Observation] = field(default_factory=dict)
    names: SettingNames = RUN_FILE_NAMES
    trial: Trial = field(default_factory=Trial)

    @contextmanager
    def watch(self, name: str, role: str = "compute") -> Iterator[None]:
        """Records the dtypes within this block and stores the result under `name`. If the block
        raises an error, nothing is stored.
        """
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
        """Returns a `Finding` for each dtype that is not the declared one. `name` is the name of
        the trial step, evaluation or sample.
        """
        return self.observations[name].violations if name in self.observations else []

    @cached_property
    def longest_rows(self) -> Sequence[Any]:
        """Returns the rows of the largest batch that can occur in training."""
        rows: Sequence[Any] = self.task.largest_rows(
            self.micro_batch or self.config.train.batch_size
        )
        return rows

    def make_batch(self, rows: Sequence[Any]) -> Batch:
        batch: Batch = self.task.collate(rows)
        return batch.to(self.prepared.device)
