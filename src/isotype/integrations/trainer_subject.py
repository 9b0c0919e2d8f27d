"""Presents a trainer to Isotype's preflight as a run: its arguments, its step, its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config.schema import DataSection, ModelSection, RunConfig, TrainSection
from ..counted import counted
from ..data.rows import IGNORED, LoadedData, SamplePrompt
from ..distributed.shard import Sharding
from ..distributed.world import ALONE, World
from ..dtypes import to_torch
from ..errors import RunError
from ..optimize import Manifest
from ..precision.accumulate import GradientAccumulator
from ..precision.resolve import Resolved
from ..training.finite import non_finite_error
from ..training.loss_scale import LossScale
from ..training.milestones import Milestones
from ..training.preflight.subject import Subject
from ..training.step import gradient_norm
from ..training.task import Check, Evaluation
from ..training.undisturbed import evaluation_mode, random_state_restored
from .attachment import Attachment
from .trainer_rows import TrainerRows

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
        return f"{counted(self.rows, 'row')} of {counted(self.length, 'token')}"


class TrainerStepper:
    """A step as the trainer makes it: its own compute_loss, its own optimizer."""

    def __init__(self, attached: Attachment) -> None:
        self.trainer, self.compute = attached.trainer, attached.precision.compute
        self.model: nn.Module = self.trainer.model
        self.optimizer = self.trainer.optimizer
        self.loss_scale: LossScale | None = None  # under accelerate's scaler no step is rehearsed
        self.sharding: Sharding | None = None  # one process has the whole model
        self.world = ALONE
        dtype = attached.precision.trainable
        # of weights in their gradients' dtype: those stay in .grad
        self.accumulator = attached.pure.accumulator if attached.pure else GradientAccumulator(self.model.parameters(), dtype=dtype)
        assert all(p.dtype == to_torch(dtype) for p in self.accumulator.parameters), "weights are in their declared dtype"

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
            loss: Tensor = trainer.compute_loss(self.model, trainer._prepare_inputs(dict(batch.inputs)))
            return loss

    def non_finite(self, batches: Sequence[TrainerBatch], *, step: int, what: str) -> RunError:
        passes: list[Callable[[], object]] = [partial(self._loss, batch) for batch in batches]
        args = self.trainer.args
        return non_finite_error(
            self.model, passes, step=step, what=what, gradient=self.accumulator.gradient, learning_rate=args.learning_rate,
            clip=args.max_grad_norm or None, compute=self.compute,
        )  # fmt: skip


class TrainerTask:
    """The task of an attached trainer: answers what the checks ask of a task."""

    def __init__(self, attached: Attachment, rows: TrainerRows) -> None:
        self.trainer, self.rows_of, self.model = attached.trainer, rows, attached.trainer.model
        self.tokenizer = tokenizer_of(self.trainer)
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

    def largest(self, count: int) -> Sequence[Any]:
        return self.rows_of.largest

    def collate(self, rows: Sequence[Any]) -> TrainerBatch:
        return TrainerBatch(self.trainer.data_collator(list(rows)))

    def rehearse_evaluation(self, model: nn.Module, device: torch.device, *, dtype: str) -> Evaluation | None:
        if not self.rows_of.largest_eval:
            return None
        batch = self.collate(self.rows_of.largest_eval)
        with evaluation_mode(model):
            loss, *_ = self.trainer.prediction_step(model, dict(batch.inputs), True)
        return None if loss is None else Evaluation(float(loss.mean()), batch.weight)

    @property
    def samples(self) -> int:
        return int(bool(self.rows_of.train) and hasattr(self.model, "generate") and getattr(self.model, "can_generate", lambda: False)())

    def sample(self, model: Any, device: torch.device, *, shortened: bool = False, world: World = ALONE) -> Sequence[Any]:
        row = self.rows_of.train[0]
        ids = torch.tensor([row.input_ids[: max(1, row.prompt_length or len(row.input_ids) // 2)]], device=device)
        with evaluation_mode(model), random_state_restored():
            model.generate(input_ids=ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        return []


def tokenizer_of(trainer: Any) -> Any | None:
    """The trainer's tokenizer, also inside a processor; None where it has none."""
    given = getattr(trainer, "processing_class", None)
    found = getattr(given, "tokenizer", given)
    return found if hasattr(found, "added_tokens_decoder") else None


@dataclass(frozen=True)
class AttachedRun:
    """The parts of an attached trainer that the checks use."""

    model: nn.Module
    resolved: Resolved
    device: torch.device
    stepper: TrainerStepper
    manifest: Manifest


def subject_of(attached: Attachment, rows: TrainerRows, folder: Path, *, resuming: bool) -> Subject[TrainerTask]:
    """The trainer's own arguments under the names of a run file. Only those that the checks read are translated."""
    trainer, args = attached.trainer, attached.trainer.args
    config = RunConfig(
        model=ModelSection(name="the trainer's model"),
        data=DataSection(train="the trainer's train_dataset", max_length=max(1, _longest(rows.train))),
        train=TrainSection(
            learning_rate=args.learning_rate, optimizer="adamw", batch_size=args.per_device_train_batch_size,
            eval_batch_size=args.per_device_eval_batch_size,
        ),
    )  # fmt: skip
    stepper = TrainerStepper(attached)
    return Subject(
        config=config, task=TrainerTask(attached, rows), folder=folder, resuming=resuming,
        prepared=AttachedRun(trainer.model, attached.resolved, args.device, stepper, attached.manifest),
        plan=Milestones(trainer.state.max_steps, eval_every=1, save_every=0, sample_every=1),
    )  # fmt: skip


def _longest(rows: Sequence[Any]) -> int:
    return max((len(row.input_ids) for row in rows), default=0)
