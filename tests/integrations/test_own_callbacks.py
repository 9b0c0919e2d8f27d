"""What a user's own callbacks write into the weights of an attached trainer, in the step and beside it."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from isotype.integrations import attach
from tests.integrations.trainers import TRAINERS, Setting

DECAY = 0.999


@torch.no_grad()
def copied(parameters):
    for p in parameters:
        p.copy_(p.bfloat16() * DECAY)


def exchanged(parameters):
    for p in parameters:
        p.data = (p.data.to(torch.bfloat16) * DECAY).float()


@torch.no_grad()
def together(parameters):
    narrow = [p.bfloat16() for p in parameters]
    torch._foreach_mul_(narrow, DECAY)
    torch._foreach_copy_(parameters, narrow)


@torch.no_grad()
def in_integers(parameters):
    for p in parameters:
        scale = p.abs().max() / 127
        p.copy_((p / scale).round().to(torch.int8) * scale)


def in_fp64(parameters):
    for p in parameters:
        p.data.mul_(DECAY).copy_(p.data.double() * DECAY)


@torch.no_grad()
def gradients(parameters):
    for p in parameters:
        if p.grad is not None:
            p.grad.copy_(p.grad.bfloat16())


DISHONEST = {
    ("on_step_end", copied): ("trainable", "bf16"),
    ("on_step_begin", exchanged): ("trainable", "bf16"),
    ("on_log", together): ("trainable", "bf16"),
    ("on_optimizer_step", in_integers): ("trainable", "int8"),
    ("on_substep_end", in_fp64): ("trainable", "fp64"),
    ("on_pre_optimizer_step", gradients): ("grads", "bf16"),
}


@torch.no_grad()
def decayed(parameters):
    torch._foreach_mul_(parameters, DECAY)


def decayed_anew(parameters):
    for p in parameters:
        p.data = p.data * DECAY


@torch.no_grad()
def with_noise_and_a_mask(parameters):
    for p in parameters:
        p.add_(1e-6 * torch.randn(p.shape, dtype=torch.bfloat16)).mul_(p.abs() > 1e-9)


@torch.no_grad()
def statistics(parameters):
    """For a log, in whatever dtype: nothing of it is trained."""
    assert sum(float(p.double().norm() + p.bfloat16().float().mean() + p.cpu().numpy().sum()) for p in parameters)


HONEST = (
    ("on_step_end", decayed),
    ("on_step_begin", decayed_anew),
    ("on_log", with_noise_and_a_mask),
    ("on_pre_optimizer_step", statistics),
)


def callback(event, change, model_of):
    def run(self, args, state, control, **given):
        change([p for p in model_of().parameters() if p.requires_grad])

    return type(change.__name__.title().replace("_", ""), (TrainerCallback,), {event: run})()


def recorded(models, folder, callbacks):
    more = {"output_dir": str(folder), "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    trainer = TRAINERS["Trainer"](Setting(models, form="full", bf16=True, more=more))
    for event, change in callbacks:
        trainer.add_callback(callback(event, change, lambda: trainer.model))
    attach(trainer, "bf16-mixed", quiet=True, preflight=False)
    trainer.train()
    assert "call_event" in vars(trainer.callback_handler)
    return json.loads((folder / "isotype" / "precision.json").read_text())


@pytest.mark.filterwarnings("ignore:isotype. error DT003")
def test_a_callback_that_rounds_what_is_trained_is_named(models, tmp_path):
    record = recorded(models, tmp_path, DISHONEST)
    found = {(v["place"]["symbol"], v["declared"].split(":")[0], v["observed"]) for v in record["violations"]}
    for (event, change), (role, dtype) in DISHONEST.items():
        by = f"{change.__name__.title().replace('_', '')}.{event}"
        assert (by, f"precision.{role}", dtype) in found
    assert all(v["place"]["file"] == __file__ for v in record["violations"])


def test_a_callback_that_computes_in_fp32_or_for_a_log_is_not_accused(models, tmp_path):
    record = recorded(models, tmp_path, HONEST)
    assert record["violations"] == []
    assert set(record["unobserved"]) == {"norms", "reduce", "loss", "generate", "save", "base"}


class FromElsewhere(TrainerCallback):
    """Averages that it keeps, and one write that is never repeated."""

    def __init__(self):
        self.kept = None

    def on_step_end(self, args, state, control, model=None, **given):
        parameters = [p for p in model.parameters() if p.requires_grad]
        if self.kept is not None:
            torch._foreach_copy_([p.data for p in parameters], self.kept)
        self.kept = [p.detach().clone() for p in parameters]

    def on_train_end(self, args, state, control, model=None, **given):
        next(model.parameters()).data.mul_(DECAY)


def test_what_a_callback_keeps_or_writes_once_is_unobserved(models, tmp_path):
    trainer = TRAINERS["Trainer"](Setting(models, form="full", more={"output_dir": str(tmp_path)}))
    trainer.add_callback(FromElsewhere())
    attach(trainer, "fp32", quiet=True, preflight=False)
    trainer.train()
    record = json.loads((tmp_path / "isotype" / "precision.json").read_text())
    assert record["violations"] == []
    assert "weights that FromElsewhere.on_step_end writes" in record["unobserved"]
    assert "weights or states that FromElsewhere.on_train_end writes" in record["unobserved"]


class Rate(TrainerCallback):
    """Adds to the learning rate, in one dtype."""

    def __init__(self, dtype, form):
        self.dtype, self.form = dtype, form

    def on_step_begin(self, args, state, control, optimizer=None, **given):
        for group in optimizer.param_groups:
            group["lr"] = self.form(torch.as_tensor(group["lr"]).to(self.dtype) + torch.tensor(3.3e-5, dtype=self.dtype))


def settings_record(models, folder, dtype, form):
    trainer = TRAINERS["Trainer"](Setting(models, form="full", more={"output_dir": str(folder)}))
    trainer.add_callback(Rate(dtype, form))
    attach(trainer, "fp32", quiet=True, preflight=False)
    trainer.train()
    return json.loads((folder / "isotype" / "precision.json").read_text())


@pytest.mark.filterwarnings("ignore:isotype. error DT003")
@pytest.mark.parametrize("form", [float, Tensor.clone, Tensor.float], ids=["number", "tensor", "widened"])
def test_a_learning_rate_that_a_callback_rounds_is_named(models, tmp_path, form):
    record = settings_record(models, tmp_path / "narrow", torch.bfloat16, form)
    if form is Tensor.clone:
        assert [(v["place"]["symbol"], v["observed"]) for v in record["violations"]] == [("Rate.on_step_begin", "bf16")]
    else:
        assert record["violations"] == []
        assert "no more bits than bf16" in record["unobserved"]["the optimizer's lr that Rate.on_step_begin sets"]
    honest = settings_record(models, tmp_path / "wide", torch.float32, form)
    assert honest["violations"] == []
    assert set(honest["unobserved"]) == {"norms", "reduce", "loss", "generate", "save", "base"}


def test_a_buffer_of_few_values_is_looked_at_without_being_judged(models, tmp_path):
    trainer = TRAINERS["Trainer"](Setting(models, form="full", bf16=True, more={"output_dir": str(tmp_path)}))
    trainer.model.model.norm.register_buffer("levels", torch.tensor([-1.0, 0.0, 1.0], dtype=torch.bfloat16))
    attach(trainer, "bf16-mixed", quiet=True, preflight=False)
    trainer.train()
    assert json.loads((tmp_path / "isotype" / "precision.json").read_text())["violations"] == []
