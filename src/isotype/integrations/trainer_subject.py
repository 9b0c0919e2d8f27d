"""Presents a trainer to Isotype's preflight as a run: its arguments, its step, its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..data.rows import IGNORED, LoadedData, SamplePrompt
from ..distributed.world import ALONE, World
from ..dtypes import to_torch
from ..errors import RunError
from ..precision.accumulate import GradientAccumulator
from ..training.finite import non_finite_error
from ..training.preflight.subject import Subject
from ..training.step import gradient_norm
from ..training.task import Evaluation
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
        return f"{self.rows} rows of {self.length} tokens"


class TrainerStepper:
    """A step as the trainer makes it: its own compute_loss, its own optimizer."""

    def __init__(self, attached: Attachment) -> None:
        self.trainer, self.compute = attached.trainer, attached.precision.compute
        self.model: nn.Module = self.trainer.model
        self.optimizer = self.trainer.optimizer
        self.loss_scale = None
        self.sharding = None  # one process has the whole model
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

    def norm(self) -> Tensor:
        """The norm of the whole gradient: fp32[]."""
        return gradient_norm(self.accumulator.gradients())

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

    def checks(self) -> dict[str, Any]:
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


def subject_of(attached: Attachment, rows: TrainerRows, folder: Path, *, resuming: bool) -> Subject[Any]:
    args = attached.trainer.args
    config = SimpleNamespace(
        train=SimpleNamespace(
            learning_rate=args.learning_rate, optimizer="adamw", batch_size=args.per_device_train_batch_size,
            eval_batch_size=args.per_device_eval_batch_size,
        ),
        data=SimpleNamespace(max_length=_longest(rows.train), packing=False, loss_on="assistant"),
    )  # fmt: skip
    prepared = SimpleNamespace(
        model=attached.trainer.model, resolved=attached.resolved, device=args.device, stepper=TrainerStepper(attached)
    )  # fmt: skip
    plan = SimpleNamespace(total=attached.trainer.state.max_steps, sample_every=1, eval_every=1)
    return Subject(
        config=cast(Any, config), task=cast(Any, TrainerTask(attached, rows)), prepared=cast(Any, prepared), plan=cast(Any, plan),
        folder=folder, resuming=resuming,
    )  # fmt: skip


def _longest(rows: Sequence[Any]) -> int:
    return max((len(row.input_ids) for row in rows), default=0)
