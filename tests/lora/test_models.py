"""Whole models: the loss, every adapter's gradient and the tokens of PEFT's own code, through `fuse_lora` and through `optimize`."""

from __future__ import annotations

import copy

import pytest
import torch

from isotype import optimize, restore
from isotype.errors import UsageError
from isotype.lora import fuse_lora

from ..models import lora, tiny
from .layers import assert_same


def step(model, ids, *, autocast=False):
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def trained(family, **changes):
    model = lora(tiny(family), **changes)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    return model


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 96, (2, 17), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3"])
def test_a_step_is_pefts(family, ids):
    model = trained(family)
    fused = copy.deepcopy(model)
    lines = fuse_lora(fused)
    assert lines
    assert all(line.op for line in lines)
    (loss, grads), (expected_loss, expected) = step(fused, ids), step(model, ids)
    torch.testing.assert_close(loss, expected_loss)
    assert_same(grads, expected, relative=1e-5)


def test_under_bf16_a_step_is_as_near_to_fp64_as_pefts(ids):
    # the rounding of activations, which both share, is most of the distance: one seed says little
    distances = {"fused": 0.0, "PEFT": 0.0}
    for seed in range(4):
        model = trained("llama", seed=seed)
        exact = step(copy.deepcopy(model).double(), ids)[1]
        fused = copy.deepcopy(model)
        fuse_lora(fused)
        for name, each in (("fused", fused), ("PEFT", model)):
            grads = step(each, ids, autocast=True)[1]
            distances[name] += sum(float((g - exact[key]).norm() / exact[key].norm()) for key, g in grads.items())
    assert distances["fused"] <= 1.1 * distances["PEFT"]


def test_the_branch_in_fp32_is_nearer_to_fp64(ids):
    distances = {"compute": 0.0, "fp32": 0.0}
    for seed in range(3):
        model = trained("llama", seed=seed)
        exact = step(copy.deepcopy(model).double(), ids)[1]
        for branch in distances:
            fused = copy.deepcopy(model)
            optimize(fused, lora_branch=branch)
            grads = step(fused, ids, autocast=True)[1]
            distances[branch] += sum(float((g - exact[key]).norm() / exact[key].norm()) for key, g in grads.items())
            # restored, nothing is left of it
            restore(fused)
            assert not any("isotype" in key for module in fused.modules() for key in vars(module))
    assert distances["fp32"] < distances["compute"]


def test_an_unknown_branch_is_refused():
    with pytest.raises(UsageError, match="expected compute or fp32"):
        optimize(trained("llama"), lora_branch="bf16")


def test_generation_between_two_steps_changes_nothing(ids):
    model = trained("llama")
    fused = copy.deepcopy(model)
    fuse_lora(fused)
    before = step(fused, ids)
    tokens = [each.eval().generate(input_ids=ids[:, :5], max_new_tokens=6, do_sample=False) for each in (fused, model)]
    assert torch.equal(*tokens)
    after = step(fused.train(), ids)
    assert torch.equal(before[0], after[0])
    assert all(torch.equal(before[1][name], after[1][name]) for name in after[1])


def test_optimize_lists_them_and_restore_undoes_them():
    model = trained("llama")
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    manifest = optimize(model)
    placed = [entry for entry in manifest.entries if entry.part == "lora"]
    assert [entry.op for entry in placed] == ["lora_linear"] * 14
    assert "lora_linear" in str(manifest)
    restore(model)
    assert before == {name: dict(vars(module)) for name, module in model.named_modules()}


def test_optimize_gives_the_reason_for_each_layer_without_an_op():
    manifest = optimize(trained("llama", lora_bias=True))
    placed = [entry for entry in manifest.entries if entry.part == "lora"]
    assert {entry.op for entry in placed} == {None}
    assert {entry.reason for entry in placed} == {"lora_B has a bias (lora_bias)"}
