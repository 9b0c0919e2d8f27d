"""The preflight of an attached trainer: Isotype's own checks on the trainer's model, arguments and
rows, before step 1.

A trainer is presented to them as a run: its arguments, its step, its rows. Checks that need a run
file are left out, and those that the trainer cannot be rehearsed for, each with its reason. It
draws, updates and logs nothing: a run with the preflight is bit-identical to one without.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..config.schema import DataSection, ModelSection, RunConfig, TrainSection
from ..data.rows import IGNORED, LoadedData, Row, SamplePrompt
from ..distributed.shard import Sharding
from ..distributed.world import ALONE, World
from ..dtypes import to_torch
from ..errors import PreflightError, RunError
from ..finding import Finding, Place, Severity
from ..model.architecture import is_vision_language
from ..observe import Observation, Observer
from ..observe.origin import find_custom_gradient_hook
from ..precision.accumulate import GradientAccumulator
from ..precision.apply import inner_model
from ..precision.vision import vision_parts
from ..tasks.language.checks import (
    ids_beyond_embeddings,
    rows_beyond_positions,
    rows_without_learnt_tokens,
    unlearnt_end_token,
    untrained_new_tokens,
)
from ..training.finite import non_finite_error
from ..training.preflight.check import Outcome, preflight
from ..training.preflight.rehearsal import rehearse_evaluation, rehearse_samples, rehearse_step
from ..training.preflight.static import check_update_sizes
from ..training.schedule import RunSchedule
from ..training.setup import Prepared, Subject
from ..training.step import LossScale, gradient_norm
from ..training.task import Check, Evaluation, eval_mode, preserve_random_state
from ..wording import pluralise
from .attachment import Attachment, MethodWrappers

_ARGUMENTS = {
    "run.sample_every: 0 trains without samples; ": "",
    "train.learning_rate": "learning_rate",
    "train.clip": "max_grad_norm",
    "train.batch_size": "per_device_train_batch_size",
    "train.accumulate": "gradient_accumulation_steps",
    "train.gradient_checkpointing: layers": "gradient_checkpointing=True",
    "precision.compute: ": "",
    "precision.trainable: fp32": "precision='bf16-mixed'",
    "precision.preset": "precision",
    "in the precision section": "in attach(trainer, precision=...)",
    "data.eval": "eval_dataset",
    "data.train": "train_dataset",
    "data.max_length": "max_length",
}


def use_argument_names(text: str) -> str:
    for setting, argument in _ARGUMENTS.items():
        text = text.replace(setting, argument)
    return text


# rows looked at: the first ones. Each of a dataset's pictures is decoded when its row is read
MAX_ROWS = 4096
MAX_PICTURE_ROWS = 32
_ID_COLUMNS = ("input_ids", "prompt_ids", "chosen_ids", "rejected_ids", "completion_ids")


def _read_first_rows(dataset: Any) -> tuple[list[Any], str]:
    """The first rows; a stream is not read, as that would take rows from it."""
    if dataset is None:
        return [], "no dataset"
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return [], "the dataset is a stream"
    limit = MAX_PICTURE_ROWS if len(dataset) and _has_pictures(dataset[0]) else MAX_ROWS
    return [dataset[i] for i in range(min(limit, len(dataset)))], ""


def _has_pictures(row: Any) -> bool:
    return isinstance(row, Mapping) and ("images" in row or "image" in row)


def _to_ids(value: Any) -> tuple[int, ...] | None:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple) and all(isinstance(i, int) for i in value):
        return tuple(value)
    return None


def _token_rows(rows: list[Any]) -> list[Row]:
    """Rows with input_ids; labels from their column, or every token where only ids are given.
    Padding of masked positions is left out.
    """
    token_rows = []
    for row in rows:
        ids = _to_ids(row.get("input_ids")) if isinstance(row, dict) else None
        if ids is None:
            return []
        labels = _to_ids(row["labels"]) if row.get("labels") is not None else None
        if row.get("completion_mask") is not None:
            mask = _to_ids(row["completion_mask"])
        else:
            mask = None
        if labels is None:
            if mask is None:
                labels = ids
            else:
                labels = tuple(i if m else IGNORED for i, m in zip(ids, mask))
        if len(labels) != len(ids):  # an encoder-decoder's
            return []
        if row.get("attention_mask") is not None:
            mask = _to_ids(row["attention_mask"])
        else:
            mask = None
        if mask is not None:
            kept_positions = [k for k, is_kept in enumerate(mask) if is_kept]
            ids = tuple(ids[k] for k in kept_positions)
            labels = tuple(labels[k] for k in kept_positions)
        prompt = next((k for k, label in enumerate(labels) if label != IGNORED), len(labels))
        token_rows.append(Row(ids, labels, prompt))
    return token_rows


def _longest_rows(rows: list[Any], count: int) -> list[Any]:
    def length(row: Any) -> int:
        if isinstance(row, dict):
            return sum(
                len(row[name])
                for name in _ID_COLUMNS
                if name in row and hasattr(row[name], "__len__")
            )
        return 0

    if rows and _has_pictures(rows[0]):  # tokens are made by the collator
        return rows[:count]
    if any(length(row) for row in rows):
        return sorted(rows, key=length, reverse=True)[:count]
    return []


NEW_TOKENS = 8  # of the rehearsed generation: the cache is used from the second on


class TrainerBatch:
    """One collated batch. weight: supervised tokens, 1 where there are no labels."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.inputs = inputs
        ids = next((v for v in inputs.values() if isinstance(v, Tensor) and v.dim() == 2), None)
        self.rows: int = ids.shape[0] if ids is not None else 1
        self.length: int = ids.shape[1] if ids is not None else 0
        labels = inputs.get("labels")
        self.weight = int((labels != IGNORED).sum()) if isinstance(labels, Tensor) else 1
        self.units = self.rows * self.length

    def to(self, device: torch.device) -> TrainerBatch:
        return self  # the trainer moves its inputs itself

    def __str__(self) -> str:
        return f"{pluralise(self.rows, 'row')} of {pluralise(self.length, 'token')}"


class TrainerStepper:
    """A step as the trainer makes it: its own compute_loss, its own optimizer."""

    def __init__(self, attachment: Attachment) -> None:
        self.trainer = attachment.trainer
        self.compute = attachment.precision.compute
        self.model: nn.Module = self.trainer.model
        self.optimizer = self.trainer.optimizer
        self.loss_scale: LossScale | None = None  # under accelerate's scaler no step is rehearsed
        self.sharding: Sharding | None = None  # one process has the whole model
        self.world = ALONE
        dtype = attachment.precision.trainable
        # of weights in their gradients' dtype: those stay in .grad
        self.accumulator = attachment.accumulator or GradientAccumulator(
            self.model.parameters(), dtype=dtype
        )
        assert all(p.dtype == to_torch(dtype) for p in self.accumulator.parameters), (
            "weights are in their declared dtype"
        )

    def accumulate(self, batches: Sequence[TrainerBatch]) -> Tensor:
        total = torch.zeros(())
        for batch in batches:
            loss = self._loss(batch)
            loss.backward()
            total = total + loss.detach().float().cpu()
        return total

    def norm(self) -> float:
        """The norm of the whole gradient."""
        return float(gradient_norm(self.accumulator.gradients()))

    def _loss(self, batch: TrainerBatch) -> Tensor:
        trainer = self.trainer
        with trainer.compute_loss_context_manager():
            loss: Tensor = trainer.compute_loss(
                self.model, trainer._prepare_inputs(dict(batch.inputs))
            )
            return loss

    def explain_non_finite(
        self, batches: Sequence[TrainerBatch], *, step: int, quantity: str
    ) -> RunError:
        passes: list[Callable[[], object]] = [partial(self._loss, batch) for batch in batches]
        args = self.trainer.args
        return non_finite_error(
            self.model,
            passes,
            step=step,
            quantity=quantity,
            gradient=self.accumulator.gradient,
            learning_rate=args.learning_rate,
            clip=args.max_grad_norm or None,
            compute=self.compute,
        )


class TrainerTask:
    """The task of an attached trainer: it answers what the checks ask of a task.

    data                the rows as tokens; empty where they are none
    no_tokens_reason    why the rows are no tokens, or ""
    longest_train_rows  the rows of the largest training batch, as the dataset has them
    longest_eval_rows   the same of an evaluation
    """

    def __init__(self, attachment: Attachment) -> None:
        self.trainer, self.model, args = (
            attachment.trainer,
            attachment.trainer.model,
            attachment.trainer.args,
        )
        self.tokenizer = find_tokenizer(self.trainer)
        rows, no_rows_reason = _read_first_rows(self.trainer.train_dataset)
        eval_dataset = self.trainer.eval_dataset
        eval_rows, _ = _read_first_rows(
            next(iter(eval_dataset.values()), None)
            if isinstance(eval_dataset, dict)
            else eval_dataset
        )
        token_rows = _token_rows(rows)
        eval_token_rows = _token_rows(eval_rows) if token_rows else []
        if token_rows:
            self.no_tokens_reason = ""
        else:
            self.no_tokens_reason = no_rows_reason or "the rows are no plain tokens with labels"
        self.longest_train_rows = _longest_rows(rows, args.per_device_train_batch_size)
        self.longest_eval_rows = _longest_rows(eval_rows, args.per_device_eval_batch_size)
        # else every token is learnt: no answers that should end
        has_masked_tokens = any(IGNORED in row.labels for row in token_rows)
        longest, longest_eval = (
            max((len(row.input_ids) for row in side), default=0)
            for side in (token_rows, eval_token_rows)
        )
        facts = {
            "train": {
                "dropped": [],
                "truncated": 0,
                "lengths": {"longest": longest},
                "files": [{"format": "messages" if has_masked_tokens else "text"}],
            },
            "eval": {"dropped": [], "lengths": {"longest": longest_eval}},
            "tokens": {"end_of_turn": {}},
            "template": None,
            "max_length": longest,
        }
        self.data = LoadedData(token_rows, eval_token_rows, [], None, facts)
        self.prompts: list[SamplePrompt] = []

    def checks(self) -> Mapping[str, tuple[Check, ...]]:
        return {}

    def largest_rows(self, count: int) -> Sequence[Any]:
        return self.longest_train_rows

    def collate(self, rows: Sequence[Any]) -> TrainerBatch:
        return TrainerBatch(self.trainer.data_collator(list(rows)))

    def rehearse_evaluation(
        self, model: nn.Module, device: torch.device, *, dtype: str
    ) -> Evaluation | None:
        if not self.longest_eval_rows:
            return None
        batch = self.collate(self.longest_eval_rows)
        with eval_mode(model):
            loss, *_ = self.trainer.prediction_step(model, dict(batch.inputs), True)
        if loss is None:
            return None
        return Evaluation(float(loss.mean()), batch.weight)

    @property
    def samples(self) -> int:
        return int(
            bool(self.data.train)
            and hasattr(self.model, "generate")
            and getattr(self.model, "can_generate", lambda: False)()
        )

    def sample(
        self, model: Any, device: torch.device, *, shortened: bool = False, world: World = ALONE
    ) -> Sequence[Any]:
        row = self.data.train[0]
        ids = torch.tensor(
            [row.input_ids[: max(1, row.prompt_length or len(row.input_ids) // 2)]], device=device
        )
        with eval_mode(model), preserve_random_state():
            model.generate(input_ids=ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        return []


def find_tokenizer(trainer: Any) -> Any | None:
    """The trainer's tokenizer, also inside a processor; None where it has none."""
    processing_class = getattr(trainer, "processing_class", None)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    return tokenizer if hasattr(tokenizer, "added_tokens_decoder") else None


def build_subject(attachment: Attachment, folder: Path, *, resuming: bool) -> Subject:
    """The trainer's own arguments under the names of a run file. Only those that the checks read
    are translated.
    """
    trainer, args, task = attachment.trainer, attachment.trainer.args, TrainerTask(attachment)
    config = RunConfig(
        model=ModelSection(name="the trainer's model"),
        data=DataSection(
            train="the trainer's train_dataset", max_length=max(1, task.data.facts["max_length"])
        ),
        train=TrainSection(
            learning_rate=args.learning_rate,
            optimizer="adamw",
            batch_size=args.per_device_train_batch_size,
            eval_batch_size=args.per_device_eval_batch_size,
        ),
    )
    # the parts of a prepared run that the checks use
    prepared = SimpleNamespace(
        model=trainer.model,
        resolved=attachment.resolved,
        device=args.device,
        stepper=TrainerStepper(attachment),
        manifest=attachment.manifest,
    )
    return Subject(
        config=config,
        task=task,
        folder=folder,
        resuming=resuming,
        prepared=cast(Prepared, prepared),
        schedule=RunSchedule(trainer.state.max_steps, eval_every=1, save_every=0, sample_every=1),
    )


def run_preflight(
    attachment: Attachment,
    folder: Path,
    skip: Mapping[str, str],
    observer: Observer,
    *,
    resuming: bool,
) -> dict[str, Observation]:
    """Returns what the observer saw of each rehearsal. Raises PreflightError with every error
    found; `attach(..., skip={"PF003": "why"})` leaves a check out.
    """
    trainer = attachment.trainer
    with _trainer_restored(trainer):
        subject = replace(
            build_subject(attachment, folder, resuming=resuming),
            observer=observer,
            violation_severity=Severity.WARNING,
        )
        _run(attachment, subject, skip)
    return subject.observations


def _run(attachment: Attachment, subject: Subject, skip: Mapping[str, str]) -> Outcome:
    trainer = attachment.trainer
    task = cast(TrainerTask, subject.task)
    checks: dict[str, tuple[Check, ...]] = {"static": (Check(("PF003",), check_update_sizes),)}
    why_not = _rehearsal_blocker(task)
    unmeasured = f", which does not run: {why_not}" if why_not else ""
    skipped = {
        "PF011": (
            "a trainer's memory is not planned; the rehearsed step of its longest batch is the"
            f" check{unmeasured}"
        ),
        **skip,
    }
    no_rows = task.no_tokens_reason
    without = no_rows or ("" if task.tokenizer else "the trainer has no processing_class")
    if hasattr(inner_model(trainer.model), "config"):
        unknown = ""
    else:
        unknown = "the model is none of transformers: its tables are not known"
    if str(trainer.args.eval_strategy.value) == "no":
        unplanned = "eval_strategy is no"
    else:
        unplanned = ""
    if vision_parts(inner_model(trainer.model)) is not None:
        blind = ""
    else:
        blind = "the model sees no pictures"
    for phase, codes, run, why in (
        ("data", ("PF005",), rows_without_learnt_tokens, no_rows),
        ("data", ("PF020",), rows_beyond_positions, unknown or no_rows),
        ("data", ("PF007",), unlearnt_end_token, without),
        ("data", ("PF008",), ids_beyond_embeddings, unknown or without),
        ("data", ("PF009",), untrained_new_tokens, unknown or without),
        ("data", ("PF023",), find_learnt_picture_tokens, unknown or blind),
        ("static", ("PF024",), find_unloadable_names, unknown),
        ("real", ("PF012", "PF013", "PF014", "PF015"), rehearse_step, why_not),
        ("real", ("PF017",), rehearse_samples, why_not),
        ("real", ("PF016",), rehearse_evaluation, why_not or unplanned),
    ):
        if why:
            skipped |= dict.fromkeys(codes, why)
        else:
            checks[phase] = (*checks.get(phase, ()), Check(codes, run))
    world = World()  # each process checks for itself, and the first one writes
    world.rank = trainer.args.process_index
    try:
        return preflight(subject, skipped, checks=checks, world=world)
    except PreflightError as error:
        attachment.restore_optimizers()  # their rates may be what was refused
        first = error.message.partition(": ")[2].split("\n")[0].split(", ")[0]
        fix = f'mend it, or attach(..., skip={{"{first}": "why it does not matter here"}})'
        raise PreflightError(use_argument_names(error.message), fix=fix) from None


def _rehearsal_blocker(task: TrainerTask) -> str:
    trainer = task.trainer
    if trainer.args.world_size > 1:
        return "several processes: a rehearsed backward would meet DDP's hooks"
    if getattr(trainer.accelerator, "scaler", None) is not None:
        return "fp16: the gradient scaler would count the rehearsed step"
    if hasattr(trainer, "_generate_and_score_completions") or hasattr(trainer, "reward_funcs"):
        return "the trainer makes its rows by generation in its first step"
    if (hook := find_custom_gradient_hook(trainer.model.parameters())) is not None:
        return (
            f"{hook} runs in backward: what it does there, as an update of the weights, could not"
            " be put back"
        )
    return "" if task.longest_train_rows else task.no_tokens_reason


@contextmanager
def _trainer_restored(trainer: Any) -> Iterator[None]:
    """Restores on exit random state, and what a trainer, its state and its collator count and draw:
    TRL's metrics, the generator of a collator with a seed. Nothing is logged.
    """
    undo: list[Callable[[], object]] = []
    for owner in (trainer, trainer.state, trainer.control, trainer.data_collator):
        for name, value in getattr(owner, "__dict__", {}).items():
            if isinstance(value, torch.Generator):
                undo.append(partial(value.set_state, value.get_state()))
            elif isinstance(value, np.random.Generator):
                undo.append(
                    partial(setattr, value.bit_generator, "state", value.bit_generator.state)
                )
            elif not _is_plain(value):
                continue
            undo.append(
                partial(
                    vars(owner).__setitem__,
                    name,
                    copy.deepcopy(value) if _is_plain(value) else value,
                )
            )
    methods = MethodWrappers(trainer)
    with preserve_random_state():
        methods.wrap("log", lambda *_, **__: None)
        try:
            yield
        finally:
            methods.restore()
            for restore in undo:
                restore()


def _is_plain(value: Any) -> bool:
    """Numbers, text and containers of them."""
    if isinstance(value, dict):
        return all(_is_plain(item) for item in (*value.keys(), *value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


# --- of a vision-language model: what it learns of a picture, and where its adapter will load


def find_learnt_picture_tokens(subject: Subject) -> Iterator[Finding]:
    """PF023: labels on the places of pictures, as trainers that learn every token have them."""
    trainer: Any = subject.task.trainer
    config = inner_model(trainer.model).config
    picture_token = next(
        (
            token
            for key in ("image_token_id", "image_token_index")
            if (token := getattr(config, key, None)) is not None
        ),
        None,
    )
    rows = list(islice(iter(trainer.train_dataset), 4))
    batch = trainer.data_collator(rows) if rows and picture_token is not None else None
    # a trainer of policies makes its rows itself
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if labels is None:
        return
    learnt_labels = int((labels != IGNORED).sum())
    picture_labels = int((labels == picture_token).sum())
    if picture_labels:
        yield Finding(
            code="PF023",
            severity=Severity.WARNING,
            place=Place(symbol="labels"),
            message=f"{picture_labels} of {learnt_labels} learnt tokens of the first rows are places of pictures",
            cause=(
                "the model learns to write the token for a picture; the user's words are learnt too"
                " where every token is"
            ),
            fix=(
                "labels of the assistant's turns alone (TRL: assistant_only_loss=True), or -100 at"
                " the places of pictures"
            ),
        )


def find_unloadable_names(subject: Subject) -> Iterator[Finding]:
    """PF024: an adapter on a family's class for text, whose names the released class does not have."""
    from transformers import AutoConfig

    model: Any = inner_model(subject.task.trainer.model)
    name = getattr(model, "name_or_path", "")
    if (
        vision_parts(model) is not None
        or not hasattr(subject.task.trainer.model, "peft_config")
        or not name
    ):
        return
    try:
        released = AutoConfig.from_pretrained(name)
    except (OSError, ValueError):  # it came from no folder or hub
        return
    if is_vision_language(released):
        yield Finding(
            code="PF024",
            severity=Severity.WARNING,
            place=Place(symbol=type(model).__name__),
            message=(
                "the adapter's names will not load onto the released model"
                f" ({(released.architectures or ['?'])[0]}): servers and"
                " AutoModelForImageTextToText find none of them"
            ),
            cause=(
                f"{type(model).__name__} is the family's class for text alone: its layers have"
                " other paths"
            ),
            fix=(
                f"load the model with AutoModelForImageTextToText.from_pretrained({name!r}), for"
                " text too"
            ),
        )
