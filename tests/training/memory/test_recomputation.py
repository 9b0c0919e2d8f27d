"""Which layers recompute: by configuration, with the numbers of a run without it, and out of generation's way."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.models import lora, tiny

from isotype.config.load import load
from isotype.errors import UsageError
from isotype.precision import PRESETS
from isotype.precision.apply import apply_precision
from isotype.training.memory.recomputation import Checkpointing, apply_checkpointing, as_configured, check_settings, checkpointable, chosen


def train_section(*settings):
    return load(None, list(settings)).config.train


@pytest.mark.parametrize(
    ("text", "expected"),
    [("all", (0, 1, 2, 3, 4)), ("2", (0, 1)), ("every 2", (0, 2, 4)), ("every 9", (0,)), ("[4, 1, 1]", (1, 4)), ("5", (0, 1, 2, 3, 4))],
)
def test_layers_are_chosen_as_written(text, expected):
    train = train_section("train.gradient_checkpointing=layers", f"train.checkpointed_layers={text}")
    assert chosen(train.checkpointed_layers, 5) == expected


@pytest.mark.parametrize(("text", "message"), [("6", "has 5 layers"), ("[5]", "0 to 4"), ("[]", "has 5 layers")])
def test_layers_that_the_model_lacks_are_refused(text, message):
    train = train_section("train.gradient_checkpointing=layers", f"train.checkpointed_layers={text}")
    with pytest.raises(UsageError, match=message):
        chosen(train.checkpointed_layers, 5)


@pytest.mark.parametrize("text", ["every 0", "sometimes", "-1"])
def test_invalid_layers_are_refused_with_the_expected_form(text):
    with pytest.raises(UsageError, match=r"train\.checkpointed_layers: expected all or a whole number .* 'every 2'"):
        train_section("train.gradient_checkpointing=layers", f"train.checkpointed_layers={text}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.gradient_checkpointing=layers+offload"], "on a CPU they are there already"),
        (["train.gradient_checkpointing=none", "train.checkpointed_layers=2"], "has no effect"),
        (["train.checkpointed_layers=every 2"], "has no effect with train.gradient_checkpointing: auto"),
    ],
)
def test_settings_without_effect_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        check_settings(train_section(*settings), device_type="cpu")


def step(model, ids):
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 96, (2, 19), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("what", [Checkpointing("layers", (0, 2), 4), Checkpointing("layers+offload", (0, 1, 2, 3), 4)], ids=str)
@pytest.mark.parametrize("preset", ["fp32", "bf16-lora"])
def test_results_are_bit_for_bit_those_without_it_also_with_dropout(what, preset, ids):
    model = lora(tiny(num_hidden_layers=4), lora_dropout=0.3)
    apply_precision(model, PRESETS[preset], device_type="cpu")
    model.train()
    recomputing = copy.deepcopy(model)
    apply_checkpointing(recomputing, what)
    calls = [0, 0]
    for counted, each in enumerate((model, recomputing)):
        for layer in checkpointable(each):
            layer.input_layernorm.register_forward_pre_hook(lambda *_, at=counted: calls.__setitem__(at, calls[at] + 1))
    expected, got = step(model, ids), step(recomputing, ids)
    assert calls == [4, 4 + len(what.layers)], "each chosen layer runs twice, the others once"
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_generation_in_training_mode_keeps_its_cache(ids):
    model = lora(tiny(num_hidden_layers=3))
    apply_precision(model, PRESETS["fp32"], device_type="cpu")
    expected = model.train().generate(input_ids=ids[:, :5], max_new_tokens=6, do_sample=False)
    apply_checkpointing(model, Checkpointing("layers", (0, 1, 2), 3))
    assert torch.equal(model.generate(input_ids=ids[:, :5], max_new_tokens=6, do_sample=False), expected)


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(UsageError, match="marks no layers"):
        as_configured(torch.nn.Linear(2, 2), train_section("train.gradient_checkpointing=layers"))
