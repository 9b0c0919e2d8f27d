"""An unmodified Trainer with `optimize(model)` called before: the same losses as without,
evaluation with and without metrics.
"""

import copy

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from isotype.optimize import optimize
from isotype.training.memory.recomputation import Checkpointing, apply_checkpointing
from tests import models
from tests.optimize.models import VOCABULARY, Rows, tiny


def accuracy(p):
    return {
        "accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean()),
        "size": p.predictions.shape[-1],
    }


def test_hugging_faces_trainer_trains_an_optimized_model_as_the_plain_one(tmp_path):
    """In bf16, of a tied head, with accumulation."""
    from transformers import Trainer, TrainingArguments

    given = TrainingArguments(
        output_dir=str(tmp_path), bf16=True, use_cpu=True, max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        logging_steps=1, report_to=[], learning_rate=1e-3, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    model = tiny("qwen2", tied=True)
    mine = copy.deepcopy(model)
    optimize(mine)
    seen = []
    for each in (model, mine):
        trainer = Trainer(each, given, train_dataset=Rows(), eval_dataset=Rows(6))
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        whole = trainer.evaluate()["eval_loss"]
        trainer.compute_metrics = accuracy
        measured = trainer.evaluate()
        assert measured["eval_size"] == VOCABULARY
        seen.append([*losses, whole, measured["eval_loss"], measured["eval_accuracy"]])
    assert len(seen[0]) >= 5
    assert seen[1] == pytest.approx(seen[0], rel=2e-2, abs=2e-2)


# --- `model.generate` in a callback of an unmodified Hugging Face Trainer: right tokens.


PROMPT = torch.arange(3, 9)[None]


def test_tokens_in_training_mode_are_right_under_checkpointing(tmp_path):
    for checkpointed in ("trainer", "isotype"):
        tokens_are_right(tmp_path, checkpointed)


def tokens_are_right(tmp_path, checkpointed):
    # without dropout both modes give the same tokens: a lost cache shows
    model = models.lora(models.tiny())
    optimize(model)
    seen = []

    class Compares(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            seen.append(
                [
                    model.train(mode).generate(input_ids=PROMPT, max_new_tokens=8, do_sample=False)
                    for mode in (True, False)
                ]
            )
            model.train()

    if checkpointed == "isotype":
        apply_checkpointing(model, Checkpointing("layers", (0, 1), 2))
    settings = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=2, per_device_train_batch_size=4, report_to=[], save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=checkpointed == "trainer", gradient_checkpointing_kwargs={"use_reentrant": False},
    )  # fmt: skip
    Trainer(model, settings, train_dataset=Rows(12, length=16), callbacks=[Compares()]).train()
    assert len(seen) == 2
    assert all(torch.equal(*pair) for pair in seen)
