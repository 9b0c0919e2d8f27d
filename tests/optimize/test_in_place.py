"""In-place arithmetic on what an optimised module gives, as models do themselves."""

from __future__ import annotations

import copy

import pytest
import torch

from isotype.optimize import optimize
from tests.models import lora
from tests.optimize.models import batch, tiny

GEMMA_3N = {
    "num_kv_shared_layers": 0, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16, "intermediate_size": [48, 48],
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "laurel_rank": 4, "activation_sparsity_pattern": None,
    "altup_num_inputs": 2, "final_logit_softcapping": 5.0,
}  # fmt: skip
# OLMo clamps its queries, keys and values in place, Gemma 3n scales a projection's output so
FAMILIES = {"olmo": {"clip_qkv": 0.5}, "gemma3n_text": GEMMA_3N}


def results(model, inputs):
    loss = model(**inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(("family", "dtype"), [("olmo", torch.float32), ("gemma3n_text", torch.bfloat16)])
def test_models_that_do_so_themselves(family, dtype):
    model = lora(tiny(family, **FAMILIES[family]), init_lora_weights=False).to(dtype)
    mine = copy.deepcopy(model)
    assert any(e.op == "lora_linear" for e in optimize(mine).replaced)
    got, want = (results(each, batch(length=40)) for each in (mine, model))
    scale = 1e-4 if dtype == torch.float32 else 0.1
    together = [torch.cat([t.double().flatten() for t in r]) for r in (got, want)]
    assert (together[0] - together[1]).norm() <= scale * together[1].norm()
    mine(**batch(length=40), use_cache=False)
    with torch.no_grad():
        mine.eval()(**batch(length=40))
