"""The preflight of an attached trainer: Isotype's own checks on the trainer's model, arguments and rows, before step 1.

A trainer is presented to them as a run. Checks that need a run file are left out, each with its reason, and nothing is rehearsed: the first
step comes next, and a rehearsal in somebody's trainer could not put back all that its code counts and draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ..config.schema import DataSection, ModelSection, RunConfig, TrainSection
from ..data.rows import IGNORED, LoadedData, Row, SamplePrompt
from ..distributed.world import World
from ..errors import PreflightError
from ..finding import Finding, Place, Severity
from ..model.architecture import is_vision_language
from ..precision.apply import inner_model
from ..precision.resolve import Resolved
from ..precision.vision import vision_parts
from ..tasks.language.checks import beyond_the_embeddings, beyond_the_positions, end_never_learnt, nothing_to_learn, untrained_new_tokens
from ..training.preflight.check import Outcome, preflight
from ..training.preflight.static import vanishing_updates
from ..training.schedule import Milestones
from ..training.setup import Prepared, Subject
from ..training.task import Check
from .attachment import Attachment

_ARGUMENTS = {
    "train.learning_rate": "learning_rate",
    "train.clip": "max_grad_norm",
    "train.batch_size": "per_device_train_batch_size",
    "train.accumulate": "gradient_accumulation_steps",
    "train.gradient_checkpointing: layers": "gradient_checkpointing=True",
    "precision.compute: ": "",
    "precision.trainable: fp32": "precision='bf16-mixed'",
    "precision.preset": "precision",
    "data.eval": "eval_dataset",
    "data.train": "train_dataset",
    "data.max_length": "max_length",
}


def in_trainers_words(text: str) -> str:
    for ours, theirs in _ARGUMENTS.items():
        text = text.replace(ours, theirs)
    return text


MOST = 4096  # rows looked at: the first ones


@dataclass(frozen=True)
class TrainerRows:
    """train, eval: as tokens, empty where they are none"""

    train: Sequence[Row]
    eval: Sequence[Row]
    why_no_tokens: str = ""

    @classmethod
    def of(cls, trainer: Any) -> TrainerRows:
        train, why = _first(trainer.train_dataset)
        evaluated = trainer.eval_dataset
        evaluated, _ = _first(next(iter(evaluated.values()), None) if isinstance(evaluated, dict) else evaluated)
        rows = _token_rows(train)
        return cls(rows, _token_rows(evaluated) if rows else [], "" if rows else why or "the rows are no plain tokens with labels")


def _first(dataset: Any) -> tuple[list[Any], str]:
    """The first rows; a stream is not read, as that would take rows from it."""
    if dataset is None:
        return [], "no dataset"
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return [], "the dataset is a stream"
    return [dataset[i] for i in range(min(MOST, len(dataset)))], ""


def _ids(value: Any) -> tuple[int, ...] | None:
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(value) if isinstance(value, list | tuple) and all(isinstance(i, int) for i in value) else None


def _token_rows(rows: list[Any]) -> list[Row]:
    """Rows with input_ids; labels from their column, or every token where only ids are given. Padding of masked positions is left out."""
    made = []
    for row in rows:
        ids = _ids(row.get("input_ids")) if isinstance(row, dict) else None
        if ids is None:
            return []
        labels = _ids(row["labels"]) if row.get("labels") is not None else None
        mask = _ids(row["completion_mask"]) if row.get("completion_mask") is not None else None
        if labels is None:
            labels = ids if mask is None else tuple(i if m else IGNORED for i, m in zip(ids, mask))
        if len(labels) != len(ids):  # an encoder-decoder's
            return []
        mask = _ids(row["attention_mask"]) if row.get("attention_mask") is not None else None
        if mask is not None:
            there = [k for k, seen in enumerate(mask) if seen]
            ids, labels = tuple(ids[k] for k in there), tuple(labels[k] for k in there)
        prompt = next((k for k, label in enumerate(labels) if label != IGNORED), len(labels))
        made.append(Row(ids, labels, prompt))
    return made


class TrainerTask:
    """What the checks of tokens ask of a task."""

    def __init__(self, trainer: Any, rows: TrainerRows) -> None:
        self.trainer, self.tokenizer = trainer, tokenizer_of(trainer)
        train, evaluated = rows.train, rows.eval
        answered = any(IGNORED in row.labels for row in train)  # else every token is learnt: no answers that should end
        facts = {
            "train": {
                "dropped": [], "truncated": 0, "lengths": {"longest": _longest(train)},
                "files": [{"format": "messages" if answered else "text"}],
            },
            "eval": {"dropped": [], "lengths": {"longest": _longest(evaluated)}},
            "tokens": {"end_of_turn": {}}, "template": None, "max_length": _longest(train),
        }  # fmt: skip
        self.data = LoadedData(train, evaluated, [], None, facts)
        self.prompts: list[SamplePrompt] = []

    def checks(self) -> Mapping[str, tuple[Check, ...]]:
        return {}


def tokenizer_of(trainer: Any) -> Any | None:
    """The trainer's tokenizer, also inside a processor; None where it has none."""
    given = getattr(trainer, "processing_class", None)
    found = getattr(given, "tokenizer", given)
    return found if hasattr(found, "added_tokens_decoder") else None


@dataclass(frozen=True)
class AttachedRun:
    """The parts of `Prepared` that these checks use."""

    model: nn.Module
    resolved: Resolved
    device: torch.device


def subject_of(attached: Attachment, rows: TrainerRows, folder: Path, *, resuming: bool) -> Subject:
    """The trainer's own arguments under the names of a run file. Only those that the checks read are translated."""
    trainer, args = attached.trainer, attached.trainer.args
    config = RunConfig(
        model=ModelSection(name="the trainer's model"),
        data=DataSection(train="the trainer's train_dataset", max_length=max(1, _longest(rows.train))),
        train=TrainSection(learning_rate=args.learning_rate, optimizer="adamw"),
    )
    return Subject(
        config=config, task=TrainerTask(trainer, rows), folder=folder, resuming=resuming,
        prepared=cast(Prepared, AttachedRun(trainer.model, attached.resolved, args.device)),
        plan=Milestones(trainer.state.max_steps, eval_every=1, save_every=0, sample_every=1),
    )  # fmt: skip


def _longest(rows: Sequence[Any]) -> int:
    return max((len(row.input_ids) for row in rows), default=0)


_FEW = 4  # rows of the batch that is looked at


def places_learnt(subject: Subject) -> Iterator[Finding]:
    """PF023: labels on the places of pictures, as trainers that learn every token have them."""
    trainer: Any = subject.task.trainer
    config = inner_model(trainer.model).config
    place = next((at for key in ("image_token_id", "image_token_index") if (at := getattr(config, key, None)) is not None), None)
    rows = list(islice(iter(trainer.train_dataset), _FEW))
    labels = trainer.data_collator(rows).get("labels") if rows and place is not None else None
    if labels is None:
        return
    learnt, places = int((labels != IGNORED).sum()), int((labels == place).sum())
    if places:
        yield Finding(
            code="PF023", severity=Severity.WARNING, place=Place(symbol="labels"),
            message=f"{places} of {learnt} learnt tokens of the first rows are places of pictures",
            cause="the model learns to write the token for a picture; the user's words are learnt too where every token is",
            fix="labels of the assistant's turns alone (TRL: assistant_only_loss=True), or -100 at the places of pictures",
        )  # fmt: skip


def names_that_do_not_load(subject: Subject) -> Iterator[Finding]:
    """PF024: an adapter on a family's class for text, whose names the released class does not have."""
    from transformers import AutoConfig

    model: Any = inner_model(subject.task.trainer.model)
    name = getattr(model, "name_or_path", "")
    if vision_parts(model) is not None or not hasattr(subject.task.trainer.model, "peft_config") or not name:
        return
    try:
        released = AutoConfig.from_pretrained(name)
    except (OSError, ValueError):  # it came from no folder or hub
        return
    if is_vision_language(released):
        yield Finding(
            code="PF024", severity=Severity.WARNING, place=Place(symbol=type(model).__name__),
            message=f"the adapter's names will not load onto the released model ({(released.architectures or ['?'])[0]}): "
            "servers and AutoModelForImageTextToText find none of them",
            cause=f"{type(model).__name__} is the family's class for text alone: its layers have other paths",
            fix=f"load the model with AutoModelForImageTextToText.from_pretrained({name!r}), for text too",
        )  # fmt: skip


_ROWS = (Check(("PF005",), nothing_to_learn),)
_POSITIONS = (Check(("PF020",), beyond_the_positions),)
_TOKENS = (Check(("PF007",), end_never_learnt),)
_TABLES = (Check(("PF008",), beyond_the_embeddings), Check(("PF009",), untrained_new_tokens))
_PLACES = (Check(("PF023",), places_learnt),)
_NAMES = (Check(("PF024",), names_that_do_not_load),)
_NOT_REHEARSED = "a step, an evaluation and a generation are not rehearsed in an attached trainer"


def run_preflight(attached: Attachment, folder: Path, skip: Mapping[str, str], *, resuming: bool) -> Outcome:
    """Raises  PreflightError with every error found; `attach(..., skip={"PF003": "why"})` leaves a check out."""
    trainer = attached.trainer
    rows = TrainerRows.of(trainer)
    checks: dict[str, tuple[Check, ...]] = {"static": (Check(("PF003",), vanishing_updates),)}
    skipped = {"PF011": "a trainer's memory is not planned", "PF012": _NOT_REHEARSED, **skip}
    without = rows.why_no_tokens or ("" if tokenizer_of(trainer) else "the trainer has no processing_class")
    unknown = "" if hasattr(inner_model(trainer.model), "config") else "the model is none of transformers: its tables are not known"
    for phase, these, why in (
        ("data", _ROWS, rows.why_no_tokens),
        ("data", _POSITIONS, unknown or rows.why_no_tokens),
        ("data", _TOKENS, without),
        ("data", _TABLES, unknown or without),
        ("data", _PLACES, unknown or ("" if vision_parts(inner_model(trainer.model)) is not None else "the model sees no pictures")),
        ("static", _NAMES, unknown),
    ):
        if why:
            skipped |= dict.fromkeys((code for check in these for code in check.codes), why)
        else:
            checks[phase] = (*checks.get(phase, ()), *these)
    world = World()  # each process checks for itself, and the first one writes
    world.rank = trainer.args.process_index
    try:
        return preflight(subject_of(attached, rows, folder, resuming=resuming), skipped, checks=checks, world=world)
    except PreflightError as error:
        attached.give_back_optimizers()  # their rates may be what was refused
        first = error.message.partition(": ")[2].split("\n")[0].split(", ")[0]
        fix = f'mend it, or attach(..., skip={{"{first}": "why it does not matter here"}})'
        raise PreflightError(in_trainers_words(error.message), fix=fix) from None
