"""attach(trainer, recorder=True): the operator that made NaN is named, and good weights are kept."""

import json

import pytest
import torch

from isotype.errors import RunError
from isotype.integrations import attach, detach
from tests.api import StepRecorder
from tests.integrations.trainers import TRAINERS, Setting, plain

pytest.importorskip("trl")

BAD_STEP = 2  # the second step


def spoil(trainer, change):
    """Replaces the loss of the second step by `change(loss)`."""
    original = type(trainer).compute_loss

    def compute_loss(self, model, inputs, return_outputs=False, **more):
        result = original(self, model, inputs, return_outputs, **more)
        loss = result[0] if return_outputs else result
        if self.state.global_step + 1 == BAD_STEP and model.training:
            loss = change(loss)
        return (loss, result[1]) if return_outputs else loss

    trainer.compute_loss = compute_loss.__get__(trainer)
    return trainer


def log_of_negative(loss):
    return torch.log(loss - 100 * loss.detach())


def square_root_of_zero(loss):
    return loss + torch.sqrt(loss - loss.detach())


def run(trainer):
    attachment = attach(trainer, "fp32", recorder=True, preflight=False, quiet=True)
    assert "MiB of host memory hold the trained weights" in str(attachment)
    with pytest.raises(RunError, match=r"NF001 step 2") as caught:
        trainer.train()
    file = f"{trainer.args.output_dir}/isotype/not_finite.json"
    with open(file) as stream:
        finding = json.load(stream)
    (note,) = caught.value.__notes__
    assert caught.value.fix == finding["fix"]
    return finding, note


def test_the_operator_of_a_loss_of_nan_is_named(models):
    trainer = spoil(plain(Setting(models, "full")), log_of_negative)
    finding, note = run(trainer)
    assert "log" in finding["message"], finding
    assert finding["place"]["file"].endswith("test_recorder.py"), finding
    assert finding["code"] in note
    detach(trainer)


def test_the_operator_of_a_gradient_of_nan_is_named(models):
    trainer = spoil(plain(Setting(models, "full")), square_root_of_zero)
    finding, _ = run(trainer)
    assert "sqrt" in json.dumps(finding), finding


def test_a_step_without_labels_is_named(models):
    trainer = plain(Setting(models, "full"))
    collate = trainer.data_collator
    batches = []

    def ignore_labels(rows):
        batch = collate(rows)
        batches.append(batch)
        if len(batches) == BAD_STEP:
            batch["labels"] = torch.full_like(batch["labels"], -100)
        return batch

    trainer.data_collator = ignore_labels
    finding, _ = run(trainer)
    assert "averages over no label: every label is -100" in finding["cause"], finding


def test_an_update_of_nan_leaves_the_last_good_weights(models):
    trainer = plain(Setting(models, "full"))
    trainer.create_optimizer()
    step = trainer.optimizer.step

    def bad_step(*args, **more):
        if trainer.state.global_step + 1 == BAD_STEP:
            for group in trainer.optimizer.param_groups:
                group["lr"] = float("inf")
        return step(*args, **more)

    trainer.optimizer.step = bad_step
    finding, _ = run(trainer)
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())
    assert finding["code"] in ("RN034", "RN036"), finding


def test_a_second_training_forgets_the_batches_of_the_first(models, monkeypatch):
    monkeypatch.setitem(globals(), "BAD_STEP", 1)
    trainer = spoil(plain(Setting(models, "full")), log_of_negative)
    attach(trainer, "fp32", recorder=True, preflight=False, quiet=True)
    (recorder,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, StepRecorder)]
    for _ in range(2):
        with pytest.raises(RunError, match=r"NF001 step 1"):
            trainer.train()
        assert len(recorder.batches) == 1


def test_training_with_a_recorder_is_unchanged(models):
    curves = []
    for recorder in (False, True):
        trainer = plain(Setting(models, "full"))
        attach(trainer, "fp32", recorder=recorder, preflight=False, record=False, quiet=True)
        torch.manual_seed(0)
        trainer.train()
        curves.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert curves[0] == curves[1]


@pytest.mark.full
def test_the_operator_is_named_in_trl(models):
    trainer = spoil(TRAINERS["SFT"](Setting(models, "lora")), log_of_negative)
    finding, _ = run(trainer)
    assert "log" in finding["message"], finding
