"""Fused LoRA and 4-bit bases on a GPU: PEFT's results, no further from fp64 than PEFT's own."""

from __future__ import annotations

import copy

import pytest
import torch

from isotype import optimize
from isotype.precision import PRESETS
from isotype.precision.apply import apply_precision
from tests.gpu import DEVICE, kernels, on_a_gpu

from ..models import lora, quantised, tiny
from .test_models import trained


def ids():
    return torch.randint(3, 96, (2, 17), generator=torch.Generator().manual_seed(0)).to(DEVICE)


def step(model, cast=None):
    model.zero_grad()
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=cast is not None):
        loss = model(input_ids=ids(), labels=ids()).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def ours(model, cast=None):
    optimize(model)
    with kernels():
        return step(model, cast)


@on_a_gpu
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3"])
def test_a_step_is_pefts(family):
    model = trained(family).to(DEVICE)
    (loss, grads), (want, expected) = ours(copy.deepcopy(model)), step(model)
    torch.testing.assert_close(loss, want)
    for name, gradient in grads.items():
        assert (gradient - expected[name]).norm() <= 1e-4 * expected[name].norm(), name


@on_a_gpu
def test_under_bf16_a_step_is_as_near_to_fp64_as_pefts():
    distances = {"fused": 0.0, "PEFT": 0.0}
    for seed in range(4):
        model = trained("llama", seed=seed).to(DEVICE)
        exact = step(copy.deepcopy(model).double())[1]
        found = {"PEFT": step(model, torch.bfloat16)[1], "fused": ours(copy.deepcopy(model), torch.bfloat16)[1]}
        for name, grads in found.items():
            distances[name] += sum(float((g - exact[key]).norm() / exact[key].norm()) for key, g in grads.items())
    assert distances["fused"] <= 1.2 * distances["PEFT"]


@on_a_gpu
def test_a_4_bit_base_trains_evaluates_and_generates():
    pytest.importorskip("bitsandbytes")
    model = lora(quantised(tiny("llama", hidden_size=64, head_dim=16))).to(DEVICE)
    optimize(model, PRESETS["nf4-lora"])
    apply_precision(model, PRESETS["nf4-lora"], device_type=DEVICE)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
    losses = []
    with kernels():
        for _ in range(8):
            loss, grads = step(model.train())
            assert {g.dtype for g in grads.values()} == {torch.float32}
            optimizer.step()
            losses.append(float(loss))
            model.eval().generate(ids()[:, :4], max_new_tokens=3, do_sample=False)
    assert losses[-1] < losses[0]
