"""An optimised model under what people do to models: PEFT, deepcopy, both checkpointings, compile, saving."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from isotype.errors import UsageError
from isotype.optimize import optimize
from isotype.precision import PRESETS
from tests.models import assert_same_step, step
from tests.optimize.models import batch, tiny


def same_training(model, mine):
    assert_same_step(step(mine, **batch()), step(model, **batch()))


def with_peft(model, **more):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"], init_lora_weights=False, **more)
    return get_peft_model(model, config)


@pytest.mark.parametrize(("when", "more"), [("before", {}), ("after", {}), ("after", {"modules_to_save": ["lm_head"]})])
def test_optimize_before_or_after_peft_trains_the_same(when, more):
    model, mine = with_peft(tiny("qwen2"), **more), tiny("qwen2")
    if when == "before":
        optimize(mine)
    mine = with_peft(mine, **more)
    if when == "after":
        manifest = optimize(mine)
        assert manifest.replaced
    same_training(model, mine)
    prompt = batch()["input_ids"][:, :4]
    assert torch.equal(*(m.generate(input_ids=prompt, max_new_tokens=4, do_sample=False) for m in (model, mine)))
    with mine.disable_adapter(), model.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(mine(**batch()).loss, model(**batch()).loss)


@pytest.mark.parametrize("reentrant", [True, False])
def test_training_under_checkpointing_is_the_same(reentrant):
    model = tiny("gemma2")
    mine = copy.deepcopy(model)
    optimize(mine)
    for m in (model, mine):
        m.train()
        m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    same_training(model, mine)


def test_what_is_no_known_model_is_reported_or_refused():
    assert "nothing in this model was recognised" in str(optimize(nn.Linear(2, 2)))
    with pytest.raises(UsageError, match="takes a model, not a str"):
        optimize("llama")


@pytest.mark.parametrize("precision", ["bf16", torch.bfloat16, PRESETS["bf16-lora"], "bf16-lora grads=bf16"], ids=str)
def test_a_precision_in_any_form(precision):
    model = tiny("llama")
    assert "norms give bf16" in str(optimize(model, precision))
    assert model.model.norm(torch.randn(2, 32)).dtype == torch.bfloat16


@pytest.mark.parametrize(("precision", "says"), [("bf16-lra", "expected one of fp32 bf16-mixed bf16-lora"), (16, "not a int")])
def test_a_precision_that_is_none(precision, says):
    with pytest.raises(UsageError, match=says):
        optimize(tiny("llama"), precision)


def exchanged_activation(model):
    model.model.layers[0].mlp.act_fn = nn.ReLU()


def another_epsilon(model):
    model.model.norm.variance_epsilon = 0.5


def doubled_activation(model):
    model.model.layers[1].mlp.act_fn.register_forward_hook(lambda module, args, output: output * 2)


@pytest.mark.parametrize("change", [exchanged_activation, another_epsilon, doubled_activation])
def test_what_changes_on_a_module_after_optimize_is_computed(change):
    model, mine = tiny("llama"), tiny("llama")
    assert optimize(mine).replaced
    for each in (model, mine):
        step(each, **batch())
        change(each)
    same_training(model, mine)
    copied = copy.deepcopy(mine)
    same_training(model, copied)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_model_outlined_on_the_meta_device_is_optimised_and_filled(family):
    """As `torch.device("meta")` makes it, for `load_state_dict(assign=True)`: its tables are asked for their form, and have no values."""
    plain = tiny(family)
    with torch.device("meta"):
        model = type(plain)(plain.config)
    placed = optimize(model, device_type="cpu")
    assert all(buffer.is_meta for _, buffer in model.named_buffers())
    assert [(e.module, e.op) for e in placed.entries] == [(e.module, e.op) for e in optimize(tiny(family)).entries]
    model.load_state_dict(plain.state_dict(), assign=True)
    for name, buffer in plain.named_buffers():
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path).register_buffer(leaf, buffer, persistent=False)
    same_training(plain, model)
