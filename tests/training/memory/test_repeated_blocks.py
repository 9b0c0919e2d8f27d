"""A plan from two of each run of equal blocks is the plan of all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("diffusers")

from benchmarks.diffusion_matrix import CLASSES, plain_objective, random_batch

from isotype.config.load import load
from isotype.environment.hardware import detect
from isotype.precision.apply import denoiser_blocks
from isotype.tasks.diffusion.denoiser import built
from isotype.tasks.diffusion.families import Asked
from isotype.tasks.diffusion.loss import picture_losses
from isotype.training.memory import plan
from isotype.training.memory.plan import plan_memory
from isotype.training.memory.recomputation import LAYERS, NONE, Checkpointing
from isotype.training.setup import resolve_precision
from isotype.training.task import Outline, StepOutline

pytestmark = pytest.mark.full


def made(**blocks):
    """(a Flux with a LoRA on the meta device, its configuration, precision, a step)"""
    make, family = CLASSES["Flux"]
    loaded = load(None, ["precision.preset=bf16-lora", "adapter.r=4", "model.device=cpu", "train.batch_size=1", "train.accumulate=2"])
    precision = resolve_precision(loaded.config, loaded.sources, detect("cpu"), {"timesteps": "fp32", "latents": "fp32"}).precision
    config = make().config
    batch = random_batch(family, config, precision)
    with torch.device("meta"):
        denoiser = type(make()).from_config({**config, **blocks})
        model, _ = built(denoiser, family, loaded.config, precision, device_type="cpu")

    def on(device):
        words = {name: torch.empty_like(tensor, device=device) for name, tensor in batch.text.items()}
        parts = {name: torch.empty_like(getattr(batch, name), device=device) for name in ("latents", "noise", "sigma")}
        return replace(batch, text=words, **parts)

    def loss_sum(model, given, divisor=1):
        return picture_losses(model, family, plain_objective(family), given, Asked(), dtype="fp32").sum() / divisor

    def evaluation(model, device):
        with torch.no_grad():
            loss_sum(model, on(device))

    step = StepOutline(rows=2, length=16, batch=on, loss_sum=loss_sum, evaluation=evaluation)
    return Outline(model, 0, 0), loaded.config.train, precision, step


@pytest.mark.parametrize("kind", [NONE, LAYERS])
def test_it_is_the_plan_of_all_blocks(monkeypatch, kind):
    outline, train, precision, step = made(num_layers=1, num_single_layers=8)
    checkpointing = Checkpointing(kind, tuple(range(9)) if kind == LAYERS else (), 9)
    ran, own = [], plan._count
    monkeypatch.setattr(plan, "_count", lambda model, *args, **given: ran.append(len(denoiser_blocks(model))) or own(model, *args, **given))
    short = plan_memory(outline, train, precision, step, checkpointing=checkpointing)
    assert ran == [1 + 2, 1 + 3]
    assert len(denoiser_blocks(outline.model)) == 9
    monkeypatch.setattr(plan, "counted_by_runs", lambda model, count: count())
    whole = plan_memory(outline, train, precision, step, checkpointing=checkpointing)
    assert replace(short, peak=0) == replace(whole, peak=0)
    assert short.peak == pytest.approx(whole.peak, rel=0.05)
    assert ran[2:] == [9]
    assert short.not_simulated is None
    assert 0 < short.activations < short.peak
