"""An optimised model saved whole, copied, and pickled: it loads in another process, trains alike, and can be restored."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from isotype.optimize import optimize, restore
from isotype.precision import PRESETS
from isotype.precision.apply import apply_precision, precision_of
from tests.models import lora, quantised
from tests.optimize.models import FAMILIES, batch, tiny


def torch_saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"torch.save": torch_saved, "pickle": lambda model: pickle.loads(pickle.dumps(model)), "deepcopy": copy.deepcopy}
PROMPT = torch.arange(3, 9)[None]


def made(family, kind):
    model = tiny(family) if family in ("gemma2",) else tiny(family, attn_implementation="sdpa")
    if kind == "nf4":
        model = quantised(model)
    return model if kind == "plain" else lora(model, init_lora_weights=False)


def same_behaviour(model, twin):
    assert model.training == twin.training
    losses = [each(**batch(length=40)).loss for each in (model, twin)]
    assert torch.equal(losses[0].detach() * 1, losses[1].detach() * 1)
    for loss in losses:
        loss.backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)
    tokens = [each.generate(input_ids=PROMPT, max_new_tokens=4, do_sample=False, pad_token_id=0) for each in (model, twin)]
    assert torch.equal(*tokens)


CASES = [
    *(pytest.param(family, "plain", "torch.save", marks=() if family == "gemma2" else pytest.mark.full) for family in FAMILIES),
    *(("llama", "lora", way) for way in WAYS),
    ("phi3", "nf4", "torch.save"),
]


@pytest.mark.parametrize(("family", "kind", "way"), CASES)
def test_what_is_read_back_is_optimised_and_independent(family, kind, way):
    model = made(family, kind)
    places = len(optimize(model).replaced)
    model(**batch()).loss.backward()
    model.zero_grad()
    twin = WAYS[way](model)
    same_behaviour(model, twin)
    originals = {id(module) for module in model.modules()}
    methods = [value for module in twin.modules() for value in vars(module).values() if hasattr(value, "__self__")]
    assert methods
    assert not any(id(method.__self__) in originals for method in methods)
    assert restore(twin) == restore(model) == places
    assert not any("forward" in vars(module) or "generate" in vars(module) for module in twin.modules())


@pytest.mark.parametrize("way", [torch_saved, copy.deepcopy])
def test_a_declared_precision_is_saved_with_the_model(way):
    model = tiny("qwen2")
    optimize(model, "bf16-lora")
    apply_precision(model, PRESETS["bf16-lora"], device_type="cpu")
    twin = way(model)
    assert precision_of(twin) == PRESETS["bf16-lora"]
    same_behaviour(model, twin)
