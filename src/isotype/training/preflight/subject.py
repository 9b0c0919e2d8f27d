"""`Subject`: the prepared run that every check of the preflight gets, and the protocols of its parts.

The loop's own task and stepper satisfy them, and so do those of an attached trainer (`isotype.integrations`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ...config.schema import RunConfig
from ...distributed.shard import Sharding
from ...distributed.world import ALONE, World
from ...errors import RunError
from ...finding import Finding, Severity
from ...observe import Observation, Observer
from ...optimize import Manifest
from ...precision.accumulate import GradientAccumulator
from ...precision.resolve import Resolved
from ..schedule import Milestones
from ..step import LossScale
from ..task import Batch, Check, Evaluation, Sample


class CheckedTask(Protocol):
    """The part of a `training.task.Task` that the checks use."""

    def checks(self) -> Mapping[str, tuple[Check, ...]]: ...

    def largest(self, count: int) -> Sequence[Any]: ...

    def collate(self, rows: Sequence[Any]) -> Batch: ...

    def rehearse_evaluation(self, model: nn.Module, device: torch.device, *, dtype: str) -> Evaluation | None: ...

    @property
    def samples(self) -> int: ...

    def sample(self, model: nn.Module, device: torch.device, *, shortened: bool = False, world: World = ALONE) -> Sequence[Sample]: ...


class CheckedStepper(Protocol):
    """The part of a `training.step.Stepper` that the checks use: forward and backward, then one update."""

    accumulator: GradientAccumulator
    loss_scale: LossScale | None
    sharding: Sharding | None
    world: World

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def accumulate(self, batches: Sequence[Any]) -> Tensor: ...

    def norm(self) -> float: ...

    def non_finite(self, batches: Sequence[Any], *, step: int, what: str) -> RunError: ...


class CheckedRun(Protocol):
    """The part of `training.setup.Prepared` that the checks use."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def resolved(self) -> Resolved: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def stepper(self) -> CheckedStepper: ...

    @property
    def manifest(self) -> Manifest: ...


AnyTask = TypeVar("AnyTask", bound=CheckedTask, covariant=True)


@dataclass(frozen=True, kw_only=True)
class Subject(Generic[AnyTask]):
    """A prepared run. `resuming`: it continues from a checkpoint, so that some of its files already exist.

    micro_batch  rows of a forward pass; by default train.batch_size
    observer     watches each rehearsal; `seen` has what it saw, and `violation` is how severe a violation is
    """

    config: RunConfig
    task: AnyTask
    prepared: CheckedRun
    plan: Milestones
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
        return self.task.largest(self.micro_batch or self.config.train.batch_size)

    def batch_of(self, rows: Sequence[Any]) -> Batch:
        return self.task.collate(rows).to(self.prepared.device)
