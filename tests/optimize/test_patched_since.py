"""A program gives a class another forward, or a modelling module another function, after its model was optimised: as in the plain model."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama as llama

from isotype.optimize import optimize, restore
from tests.models import lora
from tests.optimize.models import batch, tiny
from tests.optimize.test_families import loss_and_gradients


def scaled(original):
    def patched(*args, **kwargs):
        output = original(*args, **kwargs)
        if isinstance(output, tuple):
            return (output[0] * 1.25, *output[1:])
        return output * 1.25

    return patched


def same(plain, model):
    want, theirs = loss_and_gradients(plain, batch())
    got, grads = loss_and_gradients(model, batch())
    torch.testing.assert_close(got, want)
    assert grads.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(grads[name], theirs[name], rtol=1e-4, atol=1e-6)
    return want


PATCHED = [
    (llama.LlamaMLP, "forward"), (llama.LlamaRMSNorm, "forward"), (llama.LlamaAttention, "forward"), (llama.LlamaDecoderLayer, "forward"),
    (nn.Linear, "forward"), (llama, "apply_rotary_pos_emb"), (llama, "eager_attention_forward"),
]  # fmt: skip


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize(("of", "name"), PATCHED, ids=lambda value: getattr(value, "__name__", value))
def test_what_is_patched_after_optimize_runs(monkeypatch, of, name, adapted):
    plain = lora(tiny("llama"), init_lora_weights=False) if adapted else tiny("llama")
    model = copy.deepcopy(plain)
    optimize(model)
    before = same(plain, model)
    with monkeypatch.context() as patch:
        patch.setattr(of, name, scaled(getattr(of, name)))
        assert abs(same(plain, model) - before) > 1e-4, "the patch changes this model"
        made = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for one in made:
            same(plain, one)
        restored = copy.deepcopy(model)
        restore(restored)
        same(plain, restored)
    for one in (model, restored, *made):
        same(plain, one)


def test_the_class_that_fsdp_makes_of_a_layer_has_the_layers_own_forward():
    """FSDP2 makes a subclass of each unit's class; transformers wraps the forward that a subclass of a decoder layer inherits."""
    model = tiny("llama")
    optimize(model)
    layer = model.model.layers[0]
    method = vars(layer)["forward"]
    layer.__class__ = type("FSDPLlamaDecoderLayer", (llama.LlamaDecoderLayer,), {})
    assert type(layer).forward is not llama.LlamaDecoderLayer.forward
    assert method.stands
    layer.__class__ = type("Patched", (llama.LlamaDecoderLayer,), {"forward": scaled(llama.LlamaDecoderLayer.forward)})
    assert not method.stands
