"""Whole models, on the CPU and on a GPU: the loss, every adapter's gradient and the tokens of
PEFT's own code.
"""

import copy
from contextlib import nullcontext

import pytest
import torch

from isotype import optimize, restore
from isotype.precision import PRESETS
from isotype.precision.apply import apply_precision
from tests.gpu import DEVICE, everywhere, kernels, on_a_gpu

from ..models import lora, quantised, tiny
from ..models import step as plain_step
from .layers import assert_same


def step(model, ids, *, autocast=False):
    ids = ids.to(model.device)
    with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=autocast):
        return plain_step(model, input_ids=ids, labels=ids)


def trained(family="llama", **changes):
    model = lora(tiny(family), **changes)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    return model


def ours(model, ids, **options):
    model = copy.deepcopy(model)
    optimize(model)
    with kernels(model.device.type) if model.device.type == "cuda" else nullcontext():
        return step(model, ids, **options)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 96, (2, 17), generator=torch.Generator().manual_seed(0))


@everywhere
def test_a_step_is_pefts(ids, device, subtests):
    for family in ("llama", "qwen2", "gemma2", "phi3"):
        model = trained(family).to(device)
        (loss, grads), (expected_loss, expected) = ours(model, ids), step(model, ids)
        with subtests.test(family):
            torch.testing.assert_close(loss, expected_loss)
            assert_same(grads, expected, relative=1e-5 if device == "cpu" else 1e-4)


def distance(grads, exact):
    return sum(float((g - exact[key]).norm() / exact[key].norm()) for key, g in grads.items())


@everywhere
def test_under_bf16_a_step_is_as_near_to_fp64_as_pefts(ids, device):
    # the rounding of activations, which both share, is most of the distance: one seed says little
    distances = {"fused": 0.0, "PEFT": 0.0}
    for seed in range(4):
        model = trained(seed=seed).to(device)
        exact = step(copy.deepcopy(model).double(), ids)[1]
        for name, run in (("fused", ours), ("PEFT", step)):
            distances[name] += distance(run(model, ids, autocast=True)[1], exact)
    assert distances["fused"] <= 1.2 * distances["PEFT"]


def test_the_branch_in_fp32_is_nearer_to_fp64(ids):
    distances = {"compute": 0.0, "fp32": 0.0}
    for seed in range(3):
        model = trained("llama", seed=seed)
        exact = step(copy.deepcopy(model).double(), ids)[1]
        for branch in distances:
            fused = copy.deepcopy(model)
            optimize(fused, lora_branch=branch)
            grads = step(fused, ids, autocast=True)[1]
            distances[branch] += distance(grads, exact)
            # restored, nothing is left of it
            restore(fused)
            assert not any("isotype" in key for module in fused.modules() for key in vars(module))
    assert distances["fp32"] < distances["compute"]


@on_a_gpu
def test_a_4_bit_base_trains_evaluates_and_generates(ids):
    pytest.importorskip("bitsandbytes")
    model = lora(quantised(tiny("llama", hidden_size=64, head_dim=16))).to(DEVICE)
    optimize(model, PRESETS["nf4-lora"])
    apply_precision(model, PRESETS["nf4-lora"], device_type=DEVICE)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True
    )
    losses = []
    with kernels():
        for _ in range(8):
            model.train().zero_grad()
            loss = model(input_ids=ids.to(DEVICE), labels=ids.to(DEVICE)).loss
            loss.backward()
            assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {
                torch.float32
            }
            optimizer.step()
            losses.append(float(loss.detach()))
            model.eval().generate(ids[:, :4].to(DEVICE), max_new_tokens=3, do_sample=False)
    assert losses[-1] < losses[0]
