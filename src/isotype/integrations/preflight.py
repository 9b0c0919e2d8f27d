"""Runs Isotype's checks on the model, the arguments and the rows of an attached trainer, before
step 1. This is the preflight of the trainer.

The checks were written for `isotype train`. The classes of this module give the checks access to
the trainer. `TrainerTask` gives access to the trainer's rows, `TrainerStepper` to its step, and
`TrainerRun` to its model and precision. `ARGUMENT_NAMES` contains the trainer's names for the
settings that the checks mention. A check that needs the configuration file of `isotype train` is
skipped, and the reason is stored. The test run of a step is also skipped, with the reason, if the
trainer does not allow it. The preflight restores the random state, the weights and the logs, so a
training with the preflight is bit-identical to a training without it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..config.schema import DataSection, ModelSection, RunConfig, TrainSection
from ..data.rows import IGNORE_INDEX, LoadedData, Row, SamplePrompt
from ..distributed.shard import Sharding
from ..distributed.world import ALONE, World
from ..dtypes import to_torch
from ..errors import PreflightError, RunError
from ..finding import Finding, Place, Severity
from ..model.architecture import is_vision_language
from ..observe import Observation, Observer
from ..observe.origin import find_custom_gradient_hook
from ..optimize import Manifest
from ..precision.accumulate import GradientAccumulator
from ..precision.apply import inner_model
from ..precision.resolution import Resolved
from ..precision.vision import vision_parts
from ..tasks.language.checks import (
    check_end_token,
    check_learnt_tokens,
    check_new_tokens,
    check_positions,
    check_token_ids,
)
from ..training.finite import non_finite_error
from ..training.preflight.check import Outcome, preflight
from ..training.preflight.rehearsal import rehearse_evaluation, rehearse_samples, rehearse_step
from ..training.preflight.static import check_update_sizes
from ..training.schedule import RunSchedule
from ..training.setting_names import SettingNames
from ..training.setup import PreflightSubject
from ..training.step import LossScale, gradient_norm
from ..training.task import Check, Evaluation, eval_mode, preserve_random_state
from ..wording import pluralise
from .attachment import Attachment, MethodWrappers

# the names of the settings as arguments of the trainer and of `attach`
ARGUMENT_NAMES = SettingNames(
    learning_rate="learning_rate",
    clip="max_grad_norm",
    batch_size="per_device_train_batch_size",
    accumulate="gradient_accumulation_steps",
    checkpoint_layers="gradient_checkpointing=True",
    preset="precision",
    compute_bf16="bf16",
    fp32_weights="precision='bf16-mixed'",
    rounded_weights="precision='bf16-pure'",
    weight_dtype="precision",
    train_data="train_dataset",
    eval_data="eval_dataset",
    max_length="max_length",
    chat_template="the tokenizer's chat template",
    without_samples="",
)

# how many of the first rows are checked. A picture is decoded when its row is read
MAX_ROWS = 4096
MAX_PICTURE_ROWS = 32
# columns of a trainer's data that contain token ids
_ID_COLUMNS = ("input_ids", "prompt_ids", "chosen_ids", "rejected_ids", "completion_ids")


def _read_first_rows(dataset: Any) -> tuple[list[Any], str]:
    """Returns the first rows of the dataset and the reason why they cannot be read, which is an
    empty text if they were read. A stream is not read, because this would remove rows from it.
    """
    if dataset is None:
        return [], "no dataset"
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return [], "the dataset is a stream"
    limit = MAX_ROWS
    if len(dataset) and _has_pictures(dataset[0]):
        limit = MAX_PICTURE_ROWS
    return [dataset[i] for i in range(min(limit, len(dataset)))], ""


def _has_pictures(row: Any) -> bool:
    return isinstance(row, Mapping) and ("images" in row or "image" in row)


def _to_ids(value: Any) -> tuple[int, ...] | None:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple) and all(isinstance(i, int) for i in value):
        return tuple(value)
    return None


def _token_rows(rows: list[Any]) -> list[Row]:
    """Converts rows to tokens with labels, without padding. The list is empty if a row does not
    have the expected form.
    """
    token_rows = []
    for row in rows:
        token_row = _token_row(row) if isinstance(row, dict) else None
        if token_row is None:
            return []
        token_rows.append(token_row)
    return token_rows


def _token_row(row: dict[str, Any]) -> Row | None:
    """Converts a row. The labels come from the column `labels`. If this column is missing, all
    token ids are labels, or only the ids that `completion_mask` selects if the row has this mask.
    Tokens outside `attention_mask` are padding, and are dropped.
    """
    ids = _to_ids(row.get("input_ids"))
    if ids is None:
        return None
    labels = _to_ids(row.get("labels"))
    completion_mask = _to_ids(row.get("completion_mask"))
    attention_mask = _to_ids(row.get("attention_mask"))
    if labels is None:
        labels = ids
        if completion_mask is not None:
            labels = tuple(i if is_set else IGNORE_INDEX for i, is_set in zip(ids, completion_mask))
    if len(labels) != len(ids):  # an encoder-decoder model has labels of another length
        return None
    if attention_mask is not None:
        positions = [position for position, is_set in enumerate(attention_mask) if is_set]
        ids = tuple(ids[position] for position in positions)
        labels = tuple(labels[position] for position in positions)
    prompt_length = next(
        (position for position, label in enumerate(labels) if label != IGNORE_INDEX), len(labels)
    )
    return Row(ids, labels, prompt_length)


def _longest_rows(rows: list[Any], count: int) -> list[Any]:
    """Returns the `count` rows with the most tokens; an empty list if lengths cannot be read."""

    def length(row: Any) -> int:
        if isinstance(row, dict):
            return sum(
                len(row[name])
                for name in _ID_COLUMNS
                if name in row and hasattr(row[name], "__len__")
            )
        return 0

    if rows and _has_pictures(rows[0]):  # the collator makes the tokens
        return rows[:count]
    if any(length(row) for row in rows):
        return sorted(rows, key=length, reverse=True)[:count]
    return []


# number of tokens of the rehearsed generation; from the second token on it uses the cache
NEW_TOKENS = 8


class TrainerBatch:
    """One collated batch.

    weight  the number of supervised tokens; 1 if there are no labels
    """

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.inputs = inputs
        ids = next((v for v in inputs.values() if isinstance(v, Tensor) and v.dim() == 2), None)
        self.rows = 1
        self.length = 0
        if ids is not None:
            self.rows, self.length = ids.shape
        labels = inputs.get("labels")
        self.weight = 1
        if isinstance(labels, Tensor):
            self.weight = int((labels != IGNORE_INDEX).sum())
        self.units = self.rows * self.length

    def to(self, device: torch.device) -> TrainerBatch:
        return self  # the trainer moves its inputs itself

    def __str__(self) -> str:
        return f"{pluralise(self.rows, 'row')} of {pluralise(self.length, 'token')}"


class TrainerStepper:
    """Runs a step as the trainer does, with the trainer's compute_loss and optimizer."""

    def __init__(self, attachment: Attachment) -> None:
        self.trainer = attachment.trainer
        self.compute = attachment.precision.compute
        self.model: nn.Module = self.trainer.model
        self.optimizer = self.trainer.optimizer
        self.loss_scale: LossScale | None = None  # under accelerate's scaler no step is rehearsed
        self.sharding: Sharding | None = None  # one process has the whole model
        self.world = ALONE
        dtype = attachment.precision.trainable
        # gradients in the weights' own dtype stay in .grad
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
        """Returns the norm of the whole gradient."""
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
            names=ARGUMENT_NAMES,
        )


@dataclass(frozen=True, kw_only=True)
class TrainerRun:
    """Gives the checks access to an attached trainer. It has the attributes of a run that the
    checks read (`training.setup.CheckedRun`).
    """

    model: nn.Module
    resolved: Resolved
    device: torch.device
    manifest: Manifest
    stepper: TrainerStepper


class TrainerTask:
    """Gives the checks access to the data of an attached trainer. It has the attributes of a task
    that the checks read.

    data                the rows as tokens; empty if the rows do not consist of tokens
    no_tokens_reason    why the rows do not consist of tokens, or ""
    longest_train_rows  the rows of the largest training batch, in the form of the dataset
    longest_eval_rows   the rows of the largest evaluation batch
    """

    def __init__(self, attachment: Attachment) -> None:
        self.trainer = attachment.trainer
        self.model = self.trainer.model
        self.tokenizer = find_tokenizer(self.trainer)
        args = self.trainer.args
        rows, no_rows_reason = _read_first_rows(self.trainer.train_dataset)
        eval_dataset = self.trainer.eval_dataset
        if isinstance(eval_dataset, dict):
            eval_dataset = next(iter(eval_dataset.values()), None)
        eval_rows, _ = _read_first_rows(eval_dataset)
        token_rows = _token_rows(rows)
        eval_token_rows = _token_rows(eval_rows) if token_rows else []
        self.no_tokens_reason = ""
        if not token_rows:
            self.no_tokens_reason = no_rows_reason or "the rows are no plain tokens with labels"
        self.longest_train_rows = _longest_rows(rows, args.per_device_train_batch_size)
        self.longest_eval_rows = _longest_rows(eval_rows, args.per_device_eval_batch_size)
        # if no token is masked, every token is learnt, and there are no answers whose end is
        # checked
        has_masked_tokens = any(IGNORE_INDEX in row.labels for row in token_rows)
        longest = max((len(row.input_ids) for row in token_rows), default=0)
        longest_eval = max((len(row.input_ids) for row in eval_token_rows), default=0)
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
        self, model: Any, device: torch.device, *, is_shortened: bool = False, world: World = ALONE
    ) -> Sequence[Any]:
        row = self.data.train[0]
        prompt_length = row.prompt_length or len(row.input_ids) // 2
        ids = torch.tensor([row.input_ids[: max(1, prompt_length)]], device=device)
        with eval_mode(model), preserve_random_state():
            model.generate(input_ids=ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        return []


def find_tokenizer(trainer: Any) -> Any | None:
    """Finds the trainer's tokenizer, which may be inside a processor. Returns None if the trainer
    has no tokenizer.
    """
    processing_class = getattr(trainer, "processing_class", None)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    return tokenizer if hasattr(tokenizer, "added_tokens_decoder") else None


def build_subject(attachment: Attachment, folder: Path, *, resuming: bool) -> PreflightSubject:
    """Returns the object that the checks read. It describes the trainer in the same form as a run
    of `isotype train`. The configuration contains the trainer's arguments that the checks read.
    """
    trainer = attachment.trainer
    args = trainer.args
    task = TrainerTask(attachment)
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
    prepared = TrainerRun(
        model=trainer.model,
        resolved=attachment.resolved,
        device=args.device,
        manifest=attachment.manifest,
        stepper=TrainerStepper(attachment),
    )
    return PreflightSubject(
        config=config,
        task=task,
        folder=folder,
        is_resuming=resuming,
        prepared=prepared,
        names=ARGUMENT_NAMES,
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
    """Runs the checks, and returns what was observed in each test run.

    skip    the checks to skip, as a mapping of their codes to the reasons
    Raises  PreflightError, which lists every error
    """
    with _preserve_trainer(attachment.trainer):
        subject = replace(
            build_subject(attachment, folder, resuming=resuming),
            observer=observer,
            violation_severity=Severity.WARNING,
        )
        _run(attachment, subject, skip)
    return subject.observations


def _run(attachment: Attachment, subject: PreflightSubject, skip: Mapping[str, str]) -> Outcome:
    trainer = attachment.trainer
    checks, reasons = _select_checks(cast(TrainerTask, subject.task))
    memory_reason = (
        "a trainer's memory is not planned; the rehearsed step of its longest batch is the check"
    )
    if "PF012" in reasons:
        memory_reason += f", which does not run: {reasons['PF012']}"
    skipped = {"PF011": memory_reason, **skip, **reasons}
    world = World()  # each process checks for itself, and the first one writes
    world.rank = trainer.args.process_index
    try:
        return preflight(subject, skipped, checks=checks, world=world)
    except PreflightError as error:
        attachment.restore_optimizers()  # their learning rates may be the refused setting
        first_code = error.message.partition(": ")[2].split("\n")[0].split(", ")[0]
        fix = f'mend it, or attach(..., skip={{"{first_code}": "why it does not matter here"}})'
        raise PreflightError(error.message, fix=fix) from None


def _select_checks(task: TrainerTask) -> tuple[dict[str, tuple[Check, ...]], dict[str, str]]:
    """Returns the checks of each phase that can run on this trainer. For all other checks, returns
    a mapping from the check's code to the reason why it cannot run.
    """
    trainer = task.trainer
    inner = inner_model(trainer.model)
    rehearsal_reason = _rehearsal_blocker(task)
    tokens_reason = task.no_tokens_reason
    tokenizer_reason = "" if task.tokenizer else "the trainer has no processing_class"
    tables_reason = "the model is none of transformers: its tables are not known"
    if hasattr(inner, "config"):
        tables_reason = ""
    evaluation_reason = "eval_strategy is no" if trainer.args.eval_strategy.value == "no" else ""
    vision_reason = "" if vision_parts(inner) is not None else "the model sees no pictures"
    # (phase, codes, check, why it cannot run or "")
    candidates: tuple[tuple[str, tuple[str, ...], Callable[..., Any], str], ...] = (
        ("static", ("PF003",), check_update_sizes, ""),
        ("data", ("PF005",), check_learnt_tokens, tokens_reason),
        ("data", ("PF020",), check_positions, tables_reason or tokens_reason),
        ("data", ("PF007",), check_end_token, tokens_reason or tokenizer_reason),
        ("data", ("PF008",), check_token_ids, tables_reason or tokens_reason or tokenizer_reason),
        ("data", ("PF009",), check_new_tokens, tables_reason or tokens_reason or tokenizer_reason),
        ("data", ("PF023",), find_learnt_picture_tokens, tables_reason or vision_reason),
        ("static", ("PF024",), find_unloadable_names, tables_reason),
        ("real", ("PF012", "PF013", "PF014", "PF015"), rehearse_step, rehearsal_reason),
        ("real", ("PF017",), rehearse_samples, rehearsal_reason),
        ("real", ("PF016",), rehearse_evaluation, rehearsal_reason or evaluation_reason),
    )
    checks: dict[str, tuple[Check, ...]] = {}
    reasons: dict[str, str] = {}
    for phase, codes, run, reason in candidates:
        if reason:
            reasons |= dict.fromkeys(codes, reason)
        else:
            checks[phase] = (*checks.get(phase, ()), Check(codes, run))
    return checks, reasons


def _rehearsal_blocker(task: TrainerTask) -> str:
    """Returns the reason why no test step of this trainer can be run, or ""."""
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
    if not task.longest_train_rows:
        return task.no_tokens_reason
    return ""


@contextmanager
def _preserve_trainer(trainer: Any) -> Iterator[None]:
    """Restores the state of a trainer when the block ends. It restores PyTorch's random state, and
    attributes of the trainer, of its state and control, and of its collator. These attributes are
    plain values (such as TRL's metrics) and random generators (such as the generator of a collator
    with a seed). Within this block, the trainer logs nothing.
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
            elif _is_plain(value):
                value = copy.deepcopy(value)
            else:
                continue
            undo.append(partial(vars(owner).__setitem__, name, value))
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
    """Returns True if this is a number, a text, or a container of them."""
    if isinstance(value, dict):
        return all(_is_plain(item) for item in (*value.keys(), *value.values()))
    if isinstance(value, list | tuple | set):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


# --- vision-language models: whether they learn the tokens of pictures, and where an adapter loads


def find_learnt_picture_tokens(subject: PreflightSubject) -> Iterator[Finding]:
    """Reports labels on the tokens of pictures (PF023). A trainer that trains on every token
    creates labels for these tokens too.
    """
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
    if not rows or picture_token is None:
        return
    batch = trainer.data_collator(rows)
    # a reinforcement-learning trainer generates its rows: its batch has no labels
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if labels is None:
        return
    learnt_labels = int((labels != IGNORE_INDEX).sum())
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


def find_unloadable_names(subject: PreflightSubject) -> Iterator[Finding]:
    """Some model families have a text-only class and a released class with other layer names.
    Reports an adapter (PF024) whose model was loaded with its text-only class, if the layers have
    other names in the class that is named in the published config.json.
    """
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
    except (OSError, ValueError):  # the model was not loaded from a folder or the hub
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
