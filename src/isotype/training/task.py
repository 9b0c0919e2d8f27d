"""Defines `Task`, the protocol that each kind of training implements.

A task loads a model and its data, computes a loss, evaluates, generates samples and saves the
result. The package `training` never imports a task. The command line chooses the task
(`isotype.tasks.choose`) and passes it as an argument. The methods `check`, `load_data`, `encode`
and `build_model` are called first and in this order. All other methods are called after them.
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
HeaderRows = list[tuple[str, str]]  # rows of a label and a text


@dataclass(frozen=True)
class MetricNames:
    """The names that the output uses for a task's metrics and rows.

    `units` is the word for the items that are counted to compute the speed, for example tokens.
    `weight` is the word for the number by which a loss is divided. Both names are also used for
    keys of metrics.jsonl, such as `tokens`, `tokens_per_second` and `supervised`.
    """

    units: str
    unit: str
    """The abbreviation of a unit, for the live line: `tok`."""
    weight: str
    row_noun: str = "row"
    """The word in messages for a row of the data, such as `row` or `pair`."""
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
    """The function `Task.loss_sum`, which computes in the dtype `precision.loss` of the run."""

    def __call__(self, model: nn.Module, batch: Any, divisor: int = 1, /) -> Tensor: ...


class Batch(Protocol):
    """One micro-batch. After a call of `to`, all its tensors are on one device."""

    @property
    def rows(self) -> int:
        """The number of rows of the data that this batch contains."""

    @property
    def weight(self) -> int:
        """The number by which the sum of the batch's losses is divided, for example its number of
        supervised tokens or of pictures.
        """

    @property
    def units(self) -> int:
        """The number that is counted for the speed, for example the number of tokens or of
        pictures.
        """

    def to(self, device: torch.device) -> Batch: ...

    def __str__(self) -> str:
        """Returns the size of the batch as text, for example `4 rows of 512 tokens`."""


@dataclass(frozen=True)
class IdleBatch:
    """A batch whose loss is multiplied by 0. If processes share a model, all of them must run each
    forward pass together. A process that has no batch left computes this batch while another
    process computes a real batch.
    """

    batch: Batch
    rows: int = field(init=False, default=0)
    weight: int = field(init=False, default=0)
    units: int = field(init=False, default=0)

    def to(self, device: torch.device) -> IdleBatch:
        return IdleBatch(self.batch.to(device))


class Feed(Protocol[Row]):
    """An endless sequence of training rows. `state` returns the current position. If another `Feed`
    restores this state with `restore`, it continues from the same position.
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
        """The suffix and the content of a file with the sample. None if the sample is a text, which
        needs no file.
        """

    def to_dict(self) -> dict[str, Any]: ...

    def lines(self) -> tuple[str, str]:
        """Returns the prompt and the output as lines of text."""


@dataclass(frozen=True)
class AveragedSample:
    """A sample that was generated with the averaged weights. If a run averages its weights, each
    round of samples contains a sample from the averaged weights and a sample from the trained
    weights.
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

    loss            the sum of the losses, divided by `weight`
    weight          the number by which the sum of the losses was divided, as in `Batch.weight`
    losses_by_part  the mean loss of each part of the data, by the part's name
    measures        the values of the task's other measures
    """

    loss: float
    weight: int
    losses_by_part: Mapping[str, float] = field(default_factory=dict)
    measures: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def combine(cls, sets: Mapping[str, Evaluation]) -> Evaluation:
        """Combines the evaluations of several evaluation sets into one `Evaluation`. Its
        `losses_by_part` contains the loss of each set.
        """
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
    """One check before step 1. `codes` contains the codes of the problems that the check can
    report. If the user skips the first of these codes, the check does not run.

    run  a function that takes a `setup.PreflightSubject` of the task that has this check
    """

    codes: tuple[str, ...]
    run: Callable[[Any], Iterable[Finding]]


@dataclass(frozen=True)
class MeanSizes:
    """The mean size of a training batch and of an evaluation batch, both divided by the size of the
    largest training batch. 1.0 if all batches are as large as this one, or if the sizes are unknown.
    """

    training: float = 1.0
    evaluation: float = 1.0


@dataclass(frozen=True)
class ModelOutline:
    """A run's model on the meta device. Its tensors have shapes and dtypes, but no data.

    model      the model with its adapter and precision
    trainable  number of elements that are trained
    total      number of all elements, including those of 4-bit weights
    """

    model: nn.Module
    trainable: int
    total: int


@dataclass(frozen=True, kw_only=True)
class StepOutline:
    """The work that a memory plan simulates with tensors that have no data: the largest step, the
    largest evaluation and the largest sample.

    rows, length      the number of rows and their length in the largest micro-batch, for the output
    make_batch        a function that makes the largest micro-batch on a device
    compute_loss_sum  a function that computes the loss of this micro-batch, as `Task.loss_sum` does
    run_evaluation    a function that runs the largest evaluation pass; None if the run does not
                      evaluate
    run_sample        a function that generates the largest sample; None if the run generates no
                      samples
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
    head_flops: Callable[[nn.Module], float] = lambda model: 0.0
    """FLOPs of the forward outside of the blocks on the largest micro-batch."""


class Task(Protocol):
    """Implements one kind of training, for example the training of a language model. Each object
    belongs to one run and contains its configuration.
    """

    config: RunConfig

    @property
    def kind(self) -> str:
        """The name of this kind of run, for example `language`. The folder with the source code of
        this kind has the same name.
        """

    @property
    def metric_names(self) -> MetricNames: ...

    @property
    def roles(self) -> Mapping[str, str]:
        """Maps the keys of the section `precision` that only this kind of run has, for example
        `vae`, to their defaults. A default is a dtype, or the name of another key whose dtype is
        used.
        """

    def observed_dtypes(self) -> Iterable[tuple[str, str, str]]:
        """Returns the dtypes that the tensors for the keys in `roles` had in the last step, as
        tuples (key, tensor, dtype).
        """

    @property
    def base_name(self) -> str:
        """The name of the model that is trained, as the user wrote it."""

    # before step 1

    def count_base_weights(self) -> int | None:
        """Returns the number of weights of the base, or None if they cannot be counted. The base is
        not loaded.
        """

    def check(self, precision: Precision) -> None:
        """Checks the settings before anything is loaded. Raises UsageError if this kind of run does
        not support a setting.
        """

    def load_data(self) -> None:
        """Loads everything except the model, for example the tokenizer, the rows and the prompts.
        Raises UsageError.
        """

    def encode(self, device: torch.device) -> None:
        """Encodes the data once with other models and then frees these models. For example, it
        computes latents and text embeddings. Does nothing if the task does not need other models to
        encode its data. Raises UsageError.
        """

    def build_model(
        self, precision: Precision, device: torch.device, folder: Path, part: Part | None = None
    ) -> tuple[nn.Module, Manifest]:
        """Returns the model to train, and the `Manifest`, which lists the modules that Isotype
        replaced.

        device  the device of the run; if `part` is given, the weights are on the CPU
        folder  where a randomly initialised model (`model.init: random`) is stored, so that a
                resumed run starts from the same model
        part    if processes share the model, the rows of each weight that this process keeps; the
                other rows need no values
        """

    @property
    def rows(self) -> int:
        """The number of rows of an epoch."""

    def fingerprints(self) -> dict[str, str]:
        """Returns a hash of the `training` rows and a hash of the `evaluation` rows. The processes
        of a run compare these hashes with each other. When a run is resumed, it also compares them
        with the hashes from its last start.
        """

    @property
    def eval_rows(self) -> int:
        """The number of evaluation rows."""

    def feed(self) -> Feed[Any]:
        """Returns the training rows in the order in which the run uses them."""

    def largest_rows(self, count: int) -> Sequence[Any]:
        """Returns the rows of the largest batch that can occur in training."""

    @property
    def mean_sizes(self) -> MeanSizes:
        """The mean sizes of the run's batches, from which the time of the run is estimated."""

    def outline_model(self, precision: Precision, *, device_type: str) -> ModelOutline:
        """Returns the model that `build_model` would return, but without its weights. Raises
        UsageError if the model does not have a module that the adapter's targets name.
        """

    def outline_largest_step(self, precision: Precision) -> StepOutline:
        """Returns functions that run the largest step, the largest evaluation and the largest
        sample, so that a memory plan can simulate them.
        """
        ...

    def max_step_bytes(self, model: nn.Module, precision: Precision) -> int:
        """Returns an upper bound on the bytes that a step needs. The bound is valid even if no
        layer is recomputed, and computing it takes little time.
        """

    def checks(self) -> Mapping[str, tuple[Check, ...]]:
        """Returns, for each phase of the preflight, the checks that only this kind of run has."""

    # training

    def prepare_training(
        self, model: nn.Module, device: torch.device, folder: Path, world: World, *, dtype: str
    ) -> HeaderRows:
        """Is called once at the start of a run, after the model is built and before a checkpoint is
        restored. For example, it computes the reference log-probabilities of preference pairs.
        Returns rows for the header. Raises UsageError.
        """

    def split_by_shape(self, rows: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """Splits rows into parts, so that `collate` can make one batch from each part."""

    def collate(self, rows: Sequence[Any]) -> Batch: ...

    def prepare_step(
        self, model: nn.Module, batches: Iterable[Batch], world: World, *, dtype: str
    ) -> Iterable[Batch]:
        """Computes values that all batches of a step have in common, and adds them to the batches.
        No gradients are computed for these values. Every process calls this method with its own
        batches.
        """

    def loss_sum(self, model: nn.Module, batch: Batch, divisor: int = 1, *, dtype: str) -> Tensor:
        """Returns the sum of the losses of a batch, float[] in `dtype`, which is `precision.loss`.
        If `metric_names.measures` is not empty, the result is float[1 + measures]. It contains the
        sum of the losses, followed by the sums of the measures, which have no gradient.

        divisor  the number by which the sums are divided. Isotype's ops divide before they round
                 their result, so that a gradient is rounded only once
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
        """Returns the loss on the evaluation rows. If there are no evaluation rows, returns the
        loss on training rows.

        most    uses only `most` of the first rows; if the task's rows have lengths, it uses the
                shortest of the first rows
        stride  uses every `stride`-th row of each set
        world   the processes that call this together; each process may compute a part of the rows
                (`world.sum`), and all return the same loss
        """

    def rehearse_evaluation(
        self, model: nn.Module, device: torch.device, *, dtype: str
    ) -> Evaluation | None:
        """Runs one evaluation pass on the largest evaluation rows. Returns None if the run does not
        evaluate.
        """

    @property
    def samples(self) -> int:
        """The number of samples that the run generates in each round of samples."""

    @property
    def sample_ratio(self) -> float | None:
        """The time of a whole round of samples, divided by the time of the small test sample that
        `sample` generates if `is_shortened` is true. None if the run generates no samples or if the
        ratio is unknown.
        """

    @property
    def sample_forwards(self) -> float | None:
        """The time of a whole round of samples, divided by the time of one forward pass on a single
        token. None if the run generates no samples, or if the model does not generate token by
        token.
        """

    def sample(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        is_shortened: bool = False,
        world: World = ALONE,
    ) -> Sequence[Sample]:
        """Generates one round of samples. Generating samples does not change the state of training.

        is_shortened  whether to generate only one small sample as a test, from start to end
        world         the processes that call this together because they share the model
        """

    # the result

    def save(self, model: nn.Module, folder: Path, precision: Precision, *, step: int) -> None:
        """Writes the adapter or the model of `step` with all files that are needed to use it."""

    def write_card(
        self,
        model: nn.Module,
        folder: Path,
        precision: Precision,
        *,
        step: int,
        observed: Mapping[str, Mapping[str, int]],
    ) -> None:
        """Writes the model card of the adapter or model that `save` has written.

        observed  for each key of `precision` and each dtype, how many tensors had this dtype when
                  the dtypes were last recorded
        """

    def reload(
        self, folder: Path, precision: Precision, device: torch.device, part: Part | None = None
    ) -> nn.Module:
        """Loads what `save` wrote, in the same way as a user would, under the run's precision.
        `part` has the same meaning as in `build_model`.
        """

    # what is shown and recorded

    def header(self) -> HeaderRows:
        """Returns the rows about the data for the run's header. The rows show the amount of data,
        what the model learns from one example, and warnings about the data.
        """

    def header_details(self) -> HeaderRows:
        """Returns rows about the data that are shown only with `--verbose` and in the log."""

    def records(self) -> Mapping[str, Any]:
        """Returns the JSON files that this kind of run writes to the run folder at its start, as a
        mapping from name to content.
        """

    def begin(self, folder: Path, *, is_resuming: bool) -> None:
        """Prepares files to which the task may add lines during the run. The method `records`
        returns the files that are written only once.
        """

    def model_notes(
        self, model_outline: ModelOutline, precision: Precision
    ) -> tuple[str, list[str]]:
        """Returns the name of the architecture, and sentences about the base model that `isotype
        plan` prints. Raises UsageError in the same cases as `build_model`.
        """

    def plan_facts(self) -> dict[str, Any]:
        """Returns the value of `data` in the output of `isotype plan --json`."""

    def plan_lines(self) -> list[str]:
        """Returns the lines about the data in the output of `isotype plan`."""


def evaluation_batch_size(train: TrainSection) -> int:
    """Returns the number of rows in one evaluation pass."""
    return train.eval_batch_size or train.batch_size


def load_local_batches(
    task: Task, stream: Feed[object], batching: Batching, *, is_shared: bool
) -> list[Batch]:
    """Takes the rows of a step from the stream, and makes batches of the rows that belong to this
    process.

    is_shared  whether the processes share the model, so that they must run each forward together.
               In this case, all processes run as many forward passes as the process with the most
               batches
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
    """Within this block, the model is in evaluation mode and no gradients are computed. At the end,
    the mode of each module is restored.
    """
    with preserve_modes(model), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            reshard_units(model)


@contextmanager
def preserve_modes(model: nn.Module) -> Iterator[None]:
    """At the end of this block, restores the training or evaluation mode of every module."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            # nn.Module's __setattr__ looks for parameters and modules of this name first
            vars(module)["training"] = mode


@contextmanager
def fix_random_state() -> Iterator[None]:
    """Seeds all random generators for this block, so that two evaluations can be compared even if
    the model draws random numbers in its forward.
    """
    with preserve_random_state():
        seed_generators(0)
        yield


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """At the end of this block, restores the state of all random generators."""
    tensors, state = random_state()
    try:
        yield
    finally:
        restore_random_state(tensors, state)
