"""DoRA fused: PEFT's results and gradients, from norms that are never made of W + B A."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from isotype.lora import fuse_lora, unfuse_lora
from isotype.optimize import check_placed, optimize, restore
from tests.models import assert_same_step, lora, quantised, step, tiny

IDS = torch.arange(40).view(2, 20) * 7 % 90 + 3


def layer(dtype: torch.dtype, *, bias: bool, **settings) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48, bias=bias)).to(dtype)
    model = get_peft_model(
        model, LoraConfig(**{"r": 8, "target_modules": ["0"], "use_dora": True, **settings})
    )
    one = model.base_model.model[0]
    for p in one.parameters():
        p.data = p.data.float() if p.requires_grad else p.data
    nn.init.normal_(one.lora_B["default"].weight, std=0.05)
    one.lora_magnitude_vector["default"].weight.data *= 1 + torch.randn(48) * 0.1
    return model


def passed(model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.bfloat16):
        y = model(x)
    y.backward(dy.to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


def test_results_and_gradients_are_as_near_to_fp64_as_pefts():
    as_near(torch.float32, bias=False)
    as_near(torch.bfloat16, bias=True)


def as_near(dtype, *, bias):
    model = layer(dtype, bias=bias)
    exact, fused = copy.deepcopy(model).double(), copy.deepcopy(model)
    assert [p.op for p in fuse_lora(fused)] == ["lora_dora"]
    x, dy = torch.randn(3, 16, 64).to(dtype), torch.randn(3, 16, 48).to(dtype)
    truth, theirs, ours = (
        passed(exact, x.double(), dy.double()),
        passed(model, x, dy),
        passed(fused, x, dy),
    )
    for want, got, peft in zip(truth, ours, theirs, strict=True):
        error, reference = (float((t.double() - want).norm() / want.norm()) for t in (got, peft))
        assert error < 2 * reference + 1e-7
    unfuse_lora(fused)
    assert torch.equal(passed(fused, x, dy)[0], theirs[0])


@pytest.mark.parametrize("base", ["dense", "nf4"])
def test_a_whole_model_learns_as_with_pefts_code_and_is_restored(base):
    model = tiny(hidden_size=64, intermediate_size=128)
    if base == "nf4":
        pytest.importorskip("bitsandbytes")
        model = quantised(model, compute=torch.float32)
    model = lora(model, use_dora=True)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.05)
    want = step(model, input_ids=IDS, labels=IDS)
    manifest = optimize(model)
    assert {e.op for e in manifest.replaced if e.part == "lora"} == {"lora_dora"}
    assert_same_step(step(model, input_ids=IDS, labels=IDS), want, rtol=1e-3, atol=1e-5)
    if base == "dense":
        # a write that changes neither the address nor the version of the weight
        weight = model.get_parameter(
            "base_model.model.model.layers.0.mlp.up_proj.base_layer.weight"
        )
        weight.data.mul_(3)
        check_placed(model)
        got = step(model, input_ids=IDS, labels=IDS)
    restore(model)
    if base == "dense":
        want = step(model, input_ids=IDS, labels=IDS)
        assert_same_step(got, want, rtol=1e-3, atol=1e-5)
    assert torch.equal(step(model, input_ids=IDS, labels=IDS)[0], want[0])


def test_with_dropout_pefts_code_runs_and_the_manifest_says_why():
    (placement,) = fuse_lora(layer(torch.float32, bias=False, lora_dropout=0.1))
    assert placement.op is None
    assert "DoRA with dropout" in placement.reason
