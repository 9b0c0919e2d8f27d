"""`Task`: the protocol that each kind of training implements.

A task loads a model and its data, computes a loss, evaluates, samples, saves. `training` never
imports one: the command line chooses it (`isotype.tasks.choose`) and hands it in. The order of the
calls is `check`, `load_data`, `encode`, `build_model`, then the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..config.schema import RunConfig, TrainSection
from ..distributed.rank import Batching
from ..distributed.world import ALONE, World
from ..finding import Finding
from ..optimize import Manifest
from ..precision.parts import Part, reshard_units
from ..precision.precision import Precision
from ..runs.checkpoint.snapshot import random_state, restore_random_state, seed_generators

Row = TypeVar("Row", covariant=True)


@dataclass(frozen=True)
class MetricNames:
    """The names of a task's metrics and rows in the output.

    The speed counts `units`, and a loss is divided by `weight`. Both names are also keys of
    metrics.jsonl: `tokens`, `tokens_per_second`, `supervised`.
    """

    units: str
    unit: str
    """The abbreviation of a unit, for the live line: `tok`."""
    weight: str
    row: str = "row"
    """The word for a row of the data."""
    eval_weight: str = ""
    """The key of an evaluation's weight in metrics.jsonl; empty where it is `units`."""
    measures: tuple[str, ...] = ()
    """Numbers that are reported with the loss. Each is a mean over `weight`, and `loss_sum` returns
    their sums in this order.
    """
    compute_metrics: Callable[[dict[str, float]], Mapping[str, float]] = dict
    """Computes the numbers of metrics.jsonl from the measures by name. The default returns the
    measures unchanged.
    """
    live_line: tuple[str, ...] = ()
    """The names of the numbers that the live line shows."""


class LossSum(Protocol):
    """`Task.loss_sum` in the dtype of a run's `precision.loss`."""

    def __call__(self, model: nn.Module, batch: Any, divisor: int = 1, /) -> Tensor: ...


class Batch(Protocol):
    """One micro-batch, on one device after `to`."""

    @property
    def rows(self) -> int:
        """The number of rows of the data in this batch."""

    @property
    def weight(self) -> int:
        """The number by which the sum of its losses is divided: supervised tokens, pictures."""

    @property
    def units(self) -> int:
        """The number counted for the speed: tokens, pictures."""

    def to(self, device: torch.device) -> Batch: ...

    def __str__(self) -> str:
        """The size of the batch as text: `4 rows of 512 tokens`."""


@dataclass(frozen=True)
class IdleBatch:
    """A batch whose loss is multiplied by 0. A process computes it only because another process,
    with which it shares the model, computes a real batch.
    """

    batch: Batch
    rows: int = field(init=False, default=0)
    weight: int = field(init=False, default=0)
    units: int = field(init=False, default=0)

    def to(self, device: torch.device) -> IdleBatch:
        return IdleBatch(self.batch.to(device))


class Feed(Protocol[Row]):
    """An endless feed of training rows. `state` returns its position, from which `restore` lets
    another feed continue.
    """

    def take(self, count: int) -> Sequence[Row]: ...

    @property
    def epochs(self) -> float: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Sample(Protocol):
    """One output that the model generated during training."""

    @property
    def file(self) -> tuple[str, bytes] | None:
        """The suffix and the bytes of a file that holds the sample; None for a text."""

    def to_dict(self) -> dict[str, Any]: ...

    def lines(self) -> tuple[str, str]:
        """The prompt and the output, as text."""


@dataclass(frozen=True)
class AveragedSample:
    """A sample that the averaged weights generated. A round of samples has it in addition to the
    sample of the trained weights.
    """

    sample: Sample

    @property
    def file(self) -> tuple[str, bytes] | None:
        return self.sample.file

    def to_dict(self) -> dict[str, Any]:
        return {**self.sample.to_dict(), "weights": "average"}

    def lines(self) -> tuple[str, str]:
        prompt, output = self.sample.lines()
        return f"{prompt} (average of the weights)", output


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    loss            the mean over `weight`
    weight          the number by which the sum of the losses was divided, as in `Batch.weight`
    losses_by_part  the mean loss of each part of the data, by the part's name
    measures        the task's other numbers
    """

    loss: float
    weight: int
    losses_by_part: Mapping[str, float] = field(default_factory=dict)
    measures: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def combine(cls, sets: Mapping[str, Evaluation]) -> Evaluation:
        """Returns the evaluation of all sets; `losses_by_part` has the loss of each set."""
        evaluations = list(sets.values())
        weight = sum(evaluation.weight for evaluation in evaluations)

        def weighted_mean(values: Iterable[float]) -> float:
            products = (
                value * evaluation.weight
                for value, evaluation in zip(values, evaluations, strict=True)
            )
            return sum(products) / max(1, weight)

        common_measures = [
            name
            for name in evaluations[0].measures
            if all(name in evaluation.measures for evaluation in evaluations)
        ]
        measures = {
            name: weighted_mean(evaluation.measures[name] for evaluation in evaluations)
            for name in common_measures
        }
        return cls(
            weighted_mean(evaluation.loss for evaluation in evaluations),
            weight,
            {name: evaluation.loss for name, evaluation in sets.items()},
            measures,
        )


@dataclass(frozen=True)
class Check:
    """One check before step 1. `codes`: the codes of its findings; if the user skips the first of
    them, the check does not run.

    run  takes a `setup.PreflightSubject` of the task that has the check
    """

    codes: tuple[str, ...]
    run: Callable[[Any], Iterable[Finding]]


@dataclass(frozen=True)
class ModelOutline:
    """A run's model on the meta device: every shape and dtype, no data.

    model      with adapter and precision
    trainable  elements that are trained
    total      all elements, those of 4-bit weights included
    """

    model: nn.Module
    trainable: int
    total: int


@dataclass(frozen=True, kw_only=True)
class StepOutline:
    """The work that a memory plan runs on tensors without data: the largest step, and the largest
    evaluation and sample.

    rows, length      the size of the largest micro-batch, for the output
    make_batch        makes the largest micro-batch on a device
    compute_loss_sum  computes its loss, as `Task.loss_sum` does
    run_evaluation    runs the largest evaluation pass; None if the run does not evaluate
    run_sample        generates the largest sample; None if the run does not sample
    """

    rows: int
    length: int
    make_batch: Callable[[torch.device], Batch]
    compute_loss_sum: LossSum
    run_evaluation: Callable[[nn.Module, torch.device], None] | None = None
    run_sample: Callable[[nn.Module, torch.device], None] | None = None
    other_model_bytes: int = 0
    """Bytes of other frozen models that the run holds."""
    block_flops: Callable[[nn.Module], Sequence[float]] = lambda model: ()
    """FLOPs of each block's forward on the largest micro-batch, in the order of
    `memory.recomputation.checkpointable_layers`.
    """


class Task(Protocol):
    """One kind of run, for one configuration."""

    config: RunConfig

    @property
    def kind(self) -> str:
        """The name of this kind of run, which is also the name of its folder: `language`."""

    @property
    def metric_names(self) -> MetricNames: ...

    @property
    def roles(self) -> Mapping[str, str]:
        """The roles of `precision` that only this kind of run has. Each maps to its default dtype,
        or to the role whose dtype it takes.
        """

    def observed_dtypes(self) -> Iterable[tuple[str, str, str]]:
        """Returns (role, tensor, dtype) for the tensors of these roles in the last step."""

    @property
    def base_name(self) -> str:
        """The model that is trained, as the user named it."""

    # before step 1

    def check(self, precision: Precision) -> None:
        """Checks the settings before anything is loaded. Raises UsageError for settings that this
        kind of run does not support.
        """

    def load_data(self) -> None:
        """Loads everything but the model: tokenizer, rows, prompts. Raises UsageError."""

    def encode(self, device: torch.device) -> None:
        """Encodes the data once with other models (latents, text embeddings), and frees these
        models. Does nothing for a task without such models. Raises UsageError.
        """

    def build_model(
        self, precision: Precision, device: torch.device, folder: Path, part: Part | None = None
    ) -> tuple[nn.Module, Manifest]:
        """The model that will be trained, and the manifest of the parts that Isotype replaced.

        device  of the run; with `part` the weights are on the CPU
        folder  where a random model (`model.init: random`) is kept, so that a resumed run starts
                from the same one
        part    the rows of each weight that this process keeps, where processes share the model;
                other rows need no values
        """

    @property
    def rows(self) -> int:
        """The number of rows of an epoch."""

    def fingerprints(self) -> dict[str, str]:
        """A hash of the `training` rows and one of the `evaluation` rows. Processes compare their
        hashes with each other, and a resumed run compares them with those of its last start.
        """

    @property
    def eval_rows(self) -> int:
        """The number of evaluation rows."""

    def feed(self) -> Feed[Any]:
        """The training rows in the order the run sees them."""

    def largest_rows(self, count: int) -> Sequence[Any]:
        """The rows of the largest batch that training could ever see."""

    def outline_model(self, precision: Precision, *, device_type: str) -> ModelOutline:
        """The model as `build_model` makes it, without its weights. Raises UsageError for adapter
        targets that the model does not have.
        """

    def outline_largest_step(self, precision: Precision) -> StepOutline:
        """Returns the work of the largest step, evaluation and sample, for a memory plan."""
        ...

    def max_step_bytes(self, model: nn.Module, precision: Precision) -> int:
        """An upper bound on the bytes of a step, even without recomputation. It is cheap to
        compute.
        """

    def checks(self) -> Mapping[str, tuple[Check, ...]]:
        """The preflight's checks that only this kind of run has, by phase."""

    # training

    def prepare_training(
        self, model: nn.Module, device: torch.device, folder: Path, world: World, *, dtype: str
    ) -> list[tuple[str, str]]:
        """Work on the model as the run starts, before a checkpoint is restored; returns rows of the
        header. Raises UsageError.
        """

    def split_by_shape(self, rows: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """Splits rows into parts that `collate` can each make into one batch."""

    def collate(self, rows: Sequence[Any]) -> Batch: ...

    def prepare_step(
        self, model: nn.Module, batches: Iterable[Batch], world: World, *, dtype: str
    ) -> Iterable[Batch]:
        """Computes, without gradient, what the batches of a whole step share, and adds it to them.
        Every process calls it with its own batches.
        """

    def loss_sum(self, model: nn.Module, batch: Batch, divisor: int = 1, *, dtype: str) -> Tensor:
        """Returns the sum of the losses of a batch, float[] in `dtype`, which is `precision.loss`.
        With `metric_names.measures` the result is float[1 + measures]: the sum of the losses, then
        the sums of the measures, which have no gradient.

        divisor  the number by which the sums are divided; an op divides inside, so that a gradient
                 is rounded once
        """

    def evaluate(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        dtype: str,
        most: int | None = None,
        stride: int = 1,
        world: World = ALONE,
    ) -> Evaluation:
        """Returns the loss on the evaluation rows; on training rows where there are no evaluation
        rows.

        most    takes only `most` of the first rows, for a task with lengths the shortest of them
        stride  takes one row per `stride` rows of each set
        world   the processes that call this together; each may compute a share (`world.sum`), and
                all return the same
        """

    def rehearse_evaluation(
        self, model: nn.Module, device: torch.device, *, dtype: str
    ) -> Evaluation | None:
        """Runs one pass over the largest evaluation rows; returns None where nothing is
        evaluated.
        """

    @property
    def samples(self) -> int:
        """The number of samples of a round."""

    def sample(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        is_shortened: bool = False,
        world: World = ALONE,
    ) -> Sequence[Sample]:
        """Generates one round of samples. It does not change the state of training.

        is_shortened  generates only one small sample, from start to end, as a test
        world         the processes that call this together, since they share the model
        """

    # the result

    def save(self, model: nn.Module, folder: Path, precision: Precision) -> None:
        """Writes the adapter or the model with all files that are needed to use it."""

    def reload(
        self, folder: Path, precision: Precision, device: torch.device, part: Part | None = None
    ) -> nn.Module:
        """Loads what `save` wrote in the way a user would, under the run's precision. `part`: as in
        `build_model`.
        """

    # what is shown and recorded

    def header(self) -> list[tuple[str, str]]:
        """Lines of the run's header about its data."""

    def records(self) -> Mapping[str, Any]:
        """JSON files of the run folder that this kind of run writes at its start, by name."""

    def begin(self, folder: Path, *, is_resuming: bool) -> None:
        """Prepares the files that may grow during the run, such as lists; `records` are written
        once.
        """

    def model_notes(
        self, model_outline: ModelOutline, precision: Precision
    ) -> tuple[str, list[str]]:
        """The architecture's name, and the plan's notes about the base. Raises UsageError as
        `build_model` would.
        """

    def plan_facts(self) -> dict[str, Any]:
        """The value of `data` in `isotype plan --json`."""

    def plan_lines(self) -> list[str]:
        """The lines of `isotype plan` about the data."""


def evaluation_batch_size(train: TrainSection) -> int:
    """The number of rows in one evaluation pass."""
    return train.eval_batch_size or train.batch_size


def load_local_batches(
    task: Task, stream: Feed[object], batching: Batching, *, is_shared: bool
) -> list[Batch]:
    """Takes the rows of a step from the stream, and collates those of this process.

    is_shared  the processes share the model and run each forward together: all make as many passes
               as the process with the most batches
    """
    micro_batches: list[Sequence[Sequence[object]]] = [
        task.split_by_shape(stream.take(batching.micro_batch_size))
        for _ in range(batching.micro_batches)
    ]
    local_parts = [
        rows for number in batching.local_micro_batches for rows in micro_batches[number]
    ]
    batches = [task.collate(rows) for rows in local_parts]
    if not is_shared:
        return batches
    batches_per_rank = len(batching.local_micro_batches)
    most_passes = max(
        sum(map(len, micro_batches[first : first + batches_per_rank]))
        for first in range(0, batching.micro_batches, batches_per_rank)
    )
    return batches + [
        IdleBatch(task.collate(local_parts[0][:1])) for _ in range(most_passes - len(local_parts))
    ]


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients within this block; the modules' modes are restored."""
    with preserve_modes(model), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            reshard_units(model)


@contextmanager
def preserve_modes(model: nn.Module) -> Iterator[None]:
    """Restores the training or evaluation mode of every module on exit."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def fix_random_state() -> Iterator[None]:
    """Seeds all generators for this block, so that two evaluations can be compared even if the
    model draws random numbers in its forward.
    """
    with preserve_random_state():
        seed_generators(0)
        yield


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restores all random state on exit."""
    tensors, state = random_state()
    try:
        yield
    finally:
        restore_random_state(tensors, state)
