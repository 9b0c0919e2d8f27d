"""In-place arithmetic on whatever an optimised module gives: as models do themselves, and as hooks and wrappers of users do."""

from __future__ import annotations

import copy

import pytest
import torch

from isotype.optimize import optimize
from tests.models import lora, quantised
from tests.optimize.models import batch, tiny

GEMMA_3N = {
    "num_kv_shared_layers": 0, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16, "intermediate_size": [48, 48],
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "laurel_rank": 4, "activation_sparsity_pattern": None,
    "altup_num_inputs": 2, "final_logit_softcapping": 5.0,
}  # fmt: skip
# OLMo clamps its queries, keys and values in place, Gemma 3n scales a projection's output so
FAMILIES = {
    "llama": {}, "olmo": {"clip_qkv": 0.5}, "gemma3n_text": GEMMA_3N, "phi3": {}, "gemma2": {}, "qwen3": {}, "olmo2": {}, "glm4": {},
    "granite": {}, "cohere": {}, "starcoder2": {},
}  # fmt: skip


def made(family, kind, dtype):
    model = tiny(family, **FAMILIES[family])
    if kind == "nf4":
        model = quantised(model)
    model = model if kind == "plain" else lora(model, init_lora_weights=False)
    return model if kind == "nf4" else model.to(dtype)


def changed_in_place(module, args, output):
    y = output[0] if isinstance(output, tuple) else output
    y.mul_(1.25).clamp_(-3, 3)
    y += 0.125
    y[..., :1] = 0


def results(model, inputs):
    loss = model(**inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


# biases (glm4), layers that write themselves (olmo), one layer for gate and up (phi3)
FEW = ("llama", "olmo", "glm4", "phi3")
CASES = [
    *(pytest.param(family, "lora", marks=() if family in FEW else pytest.mark.full) for family in FAMILIES),
    ("llama", "plain"), ("llama", "nf4"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_every_replaced_modules_output_can_be_changed_in_place(family, kind):
    """Each in turn would hide what the others do: all of them, with the same hooks on the plain model."""
    model = made(family, kind, torch.float32)
    mine = copy.deepcopy(model)
    # hooks on a 4-bit layer below an adapter would send the adapter's layer to PEFT's code
    places = {e.module for e in optimize(mine).replaced if not e.module.endswith("base_layer") and e.part not in ("generate", "head")}
    assert len(places) > 1
    places.add("lm_head" if kind == "plain" else "base_model.model.lm_head")
    for each in (model, mine):
        for name, module in each.named_modules():
            if name in places:
                module.register_forward_hook(changed_in_place)
    inputs = batch(length=40)
    for got, want in zip(results(mine, inputs), results(model, inputs), strict=True):
        assert (got - want).norm() <= (2e-2 if kind == "nf4" else 1e-4) * want.norm() + 1e-6


@pytest.mark.parametrize(("family", "dtype"), [("olmo", torch.float32), ("gemma3n_text", torch.bfloat16)])
def test_models_that_do_so_themselves(family, dtype):
    model = made(family, "lora", dtype)
    mine = copy.deepcopy(model)
    assert any(e.op == "lora_linear" for e in optimize(mine).replaced)
    got, want = (results(each, batch(length=40)) for each in (mine, model))
    scale = 1e-4 if dtype == torch.float32 else 0.1
    together = [torch.cat([t.double().flatten() for t in r]) for r in (got, want)]
    assert (together[0] - together[1]).norm() <= scale * together[1].norm()
    mine(**batch(length=40), use_cache=False)
    with torch.no_grad():
        mine.eval()(**batch(length=40))
