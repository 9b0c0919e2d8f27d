"""Unmodified trainers with `optimize(model)` called before: the same losses as without, evaluation with and without metrics."""

from __future__ import annotations

import copy

import pytest
import torch

from isotype.optimize import optimize
from tests.optimize.models import VOCABULARY, batch, tiny

pytestmark = pytest.mark.slow

# Qwen2.5 is qwen2 with tied embeddings and biases in attention; Llama 3.2 is llama with tied embeddings and scaled rotary frequencies
ARCHITECTURES = {
    "Qwen2.5": ("qwen2", {}),
    "Llama 3.2": (
        "llama",
        {"rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }},
    ),
}  # fmt: skip


class Rows(torch.utils.data.Dataset):
    def __init__(self, count=16):
        self.rows = batch(count)

    def __len__(self):
        return len(self.rows["input_ids"])

    def __getitem__(self, i):
        return {name: column[i] for name, column in self.rows.items()}


def losses(trainer):
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def agrees(family, more, make):
    """`make(model)` gives the trainer and a function of its further figures: with and without our ops, training and evaluation agree."""
    model = tiny(family, tied=True, **more)
    mine = copy.deepcopy(model)
    optimize(mine)
    seen = []
    for each in (model, mine):
        trainer, measured = make(each)
        seen.append([*losses(trainer), trainer.evaluate()["eval_loss"], *measured(trainer)])
    assert len(seen[0]) >= 4
    assert seen[1] == pytest.approx(seen[0], rel=2e-2, abs=2e-2)


def arguments(tmp_path):
    return {
        "output_dir": str(tmp_path), "bf16": True, "use_cpu": True, "max_steps": 3, "per_device_train_batch_size": 4, "logging_steps": 1,
        "report_to": [], "learning_rate": 1e-3, "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip


@pytest.mark.parametrize(("architecture", "accumulation"), zip(ARCHITECTURES, (1, 2)))
def test_hugging_faces_trainer_trains_an_optimized_model_as_the_plain_one(architecture, accumulation, tmp_path):
    from transformers import Trainer, TrainingArguments

    def make(model):
        given = TrainingArguments(gradient_accumulation_steps=accumulation, **arguments(tmp_path))
        return Trainer(model, given, train_dataset=Rows(), eval_dataset=Rows(6)), with_metrics

    def with_metrics(trainer):
        trainer.compute_metrics = lambda p: {
            "accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean()),
            "size": p.predictions.shape[-1],
        }
        measured = trainer.evaluate()
        assert measured["eval_size"] == VOCABULARY
        return measured["eval_loss"], measured["eval_accuracy"]

    agrees(*ARCHITECTURES[architecture], make)
