"""Mixtures of experts: what `adapter.targets: all-linear` adapts, and that the fused experts give
PEFT's results and leave no trace.
"""

import copy

import pytest
import torch
from peft import PeftModel

from isotype.config.schema import AdapterSection
from isotype.errors import UsageError
from isotype.model.adapter import attach_adapter, load_adapter, save_adapter
from isotype.optimize import optimize, restore
from isotype.precision.precision import PRESETS
from isotype.training.memory.recomputation import Checkpointing, apply_checkpointing
from tests.api import target_notes
from tests.models import MIXTURES, assert_same_step, step, tiny

IDS = torch.arange(40).view(2, 20) * 7 % 90 + 3


def adapted(family, *, std=0.05, **section):
    model = attach_adapter(tiny(family), AdapterSection(r=4, **section), seed=0)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=std)
    return model.train()


def trained(model):
    model.zero_grad()
    out = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    return out, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_all_linear_adapts_the_experts_and_not_the_router_in_every_family(tmp_path, subtests):
    for family in MIXTURES:
        with subtests.test(family):
            experts_alone(family, tmp_path / family)


def experts_alone(family, tmp_path):
    model = adapted(family)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any(".experts.lora_A" in name for name in names)
    assert any(".experts.base_layer.lora_A" in name for name in names)
    assert not any(".gate.lora" in name or ".router.lora" in name for name in names)
    assert target_notes(model, AdapterSection()) == []
    plain, want = trained(copy.deepcopy(model))
    manifest = optimize(model)
    assert manifest.left == []
    assert "experts" in {e.op for e in manifest.replaced}
    fused, got = trained(model)
    torch.testing.assert_close(fused.logits.detach(), plain.logits.detach())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    save_adapter(model, tmp_path, PRESETS["fp32"])
    loaded = PeftModel.from_pretrained(tiny(family), str(tmp_path))
    torch.testing.assert_close(loaded(input_ids=IDS).logits, plain.logits.detach())
    assert load_adapter(tiny(family), tmp_path) is not None
    assert restore(model) == len(manifest.replaced)
    assert torch.equal(model(input_ids=IDS).logits, plain.logits)


def test_experts_obey_what_peft_switches():
    """A disabled adapter, a merged one, a second one: the result is PEFT's."""
    model = adapted("qwen3_moe").eval()
    plain = copy.deepcopy(model)
    optimize(model)
    for act in (
        lambda m: m.disable_adapter(),
        lambda m: m.merge_adapter(),
        lambda m: m.unmerge_adapter(),
        lambda m: m.add_adapter("other", m.peft_config["default"]) or m.set_adapter("other"),
    ):
        results = []
        for one in (plain, model):
            torch.manual_seed(3)
            context = act(one)
            if context is None:
                results.append(one(input_ids=IDS).logits)
            else:
                with context:
                    results.append(one(input_ids=IDS).logits)
        torch.testing.assert_close(*results)


def test_a_router_that_is_named_is_adapted_and_said_to_be():
    for family, named in (
        ("gpt_oss", {"targets": ["router"]}),
        ("olmoe", {"parameters": ["gate.weight"]}),
    ):
        section = AdapterSection(r=2, **named)
        model = attach_adapter(tiny(family), section, seed=0)
        (note,) = target_notes(model, section)
        assert note.startswith("adapter.targets: model.layers.0.mlp."), note
        assert "a router that is adapted" in note


def test_parameters_name_stacks():
    model = attach_adapter(
        tiny("mixtral"), AdapterSection(r=2, targets=[], parameters=["experts.down_proj"]), seed=0
    )
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert names
    assert all(".mlp.experts.lora_" in name for name in names)
    optimize(model)
    _, grads = trained(model.train())
    assert grads.keys() == set(names)
    with pytest.raises(
        UsageError, match=r"adapter\.parameters: experts\.down: the model has no such"
    ) as caught:
        attach_adapter(tiny("mixtral"), AdapterSection(parameters=["experts.down"]), seed=0)
    assert caught.value.fix == "one of experts.down_proj, experts.gate_up_proj"


def test_dropout_on_experts_is_refused():
    with pytest.raises(UsageError, match="adapted as a parameter, for which PEFT has no dropout"):
        attach_adapter(tiny("gpt_oss"), AdapterSection(dropout=0.1), seed=0)


def test_experts_that_are_trained_have_the_gradients_of_the_original(subtests):
    for family in MIXTURES:
        model = tiny(family).train()
        want = step(copy.deepcopy(model), input_ids=IDS, labels=IDS)
        optimize(model)
        with subtests.test(family):
            assert_same_step(step(model, input_ids=IDS, labels=IDS), want)


def test_recomputed_layers_give_the_same_gradients():
    model = adapted("gpt_oss")
    optimize(model)
    _, want = trained(model)
    want = {name: grad.clone() for name, grad in want.items()}
    apply_checkpointing(model, Checkpointing("layers", (0, 1), 2))
    _, got = trained(model)
    assert all(torch.equal(got[name], grad) for name, grad in want.items())
