"""What a recompute leaves out changes no gradient: attention whose results were kept, and the base product of a layer's last MLP."""

from __future__ import annotations

import pytest
import torch
from tests.models import lora, tiny

from isotype.ops import cpp as ops_cpp
from isotype.ops.attention import cpu, op
from isotype.optimize import optimize
from isotype.training.memory.recomputation import Checkpointing, apply_checkpointing

BF16 = {"attn_implementation": "sdpa", "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}


def model_of(family, dtype=torch.float32, **options):
    model = lora(tiny(family, **options)).train()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    if dtype != torch.float32:
        model.to(dtype)
    model.base_model.model.get_input_embeddings().weight.requires_grad_()
    optimize(model)
    return model


def gradients(model, length=40, kind="none", **options):
    model.zero_grad()
    apply_checkpointing(model, Checkpointing(kind, (0, 1) if kind != "none" else (), 2, **options))
    ids = torch.randint(3, 96, (2, length), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def counted(monkeypatch):
    """How often attention's kernel ran, and with which outputs' sizes LoRA's base products."""
    seen = {"attention": 0, "products": []}
    real, product = cpu.attention_forward, torch.nn.functional.linear

    def attention(*args):
        seen["attention"] += 1
        return real(*args)

    def linear(x, weight, bias=None):
        seen["products"].append(tuple(weight.shape))
        return product(x, weight, bias)

    monkeypatch.setattr(op.cpu, "attention_forward", attention)
    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    return seen


@pytest.mark.skipif(ops_cpp.cpu_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(("kind", "keep"), [("layers", False), ("layers", True), ("layers+offload", True)])
def test_attention_whose_results_were_kept_does_not_run_again(counted, keep, kind):
    model = model_of("llama", torch.bfloat16, **BF16)
    want = gradients(model)
    counted["attention"] = 0
    got = gradients(model, kind=kind, keep_attention=keep)
    # two layers; without keeping, each once more in backward
    assert counted["attention"] == (2 if keep else 4)
    assert torch.equal(got[0], want[0])
    assert all(torch.equal(got[1][n], g) for n, g in want[1].items())


@pytest.mark.skipif(ops_cpp.cpu_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("path", ["self_attn.o_proj", "mlp"])
def test_a_hook_sees_values_in_every_run(path):
    """What a recompute leaves out would be zeros to a hook."""
    model = model_of("llama", torch.bfloat16, **BF16)
    seen = []

    def note(module, args, output):
        seen.append((output[0] if isinstance(output, tuple) else output).detach().clone())

    model.base_model.model.model.layers[1].get_submodule(path).register_forward_hook(note)
    want = gradients(model)
    got = gradients(model, kind="layers", keep_attention=True)
    # a recompute ends where backward has all it needs, before the last of them
    assert len(seen) >= 2
    assert all(torch.equal(seen[0], other) for other in seen[1:])
    assert all(torch.equal(got[1][n], g) for n, g in want[1].items())


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_downs_base_product_is_made_once(counted, family):
    model = model_of(family)
    want = gradients(model)
    down = (32, 48)
    counted["products"].clear()
    got = gradients(model, kind="layers")
    assert counted["products"].count(down) == 2, "of two layers: forward alone"
    others = [shape for shape in counted["products"] if shape != down]
    assert len(others) % 2 == 0
    assert torch.equal(got[0], want[0])
    assert all(torch.equal(got[1][n], g) for n, g in want[1].items())


def test_a_norm_after_the_mlp_needs_its_output(counted):
    model = model_of("gemma2")
    want = gradients(model)
    counted["products"].clear()
    got = gradients(model, kind="layers")
    assert counted["products"].count((32, 48)) == 4
    assert all(torch.equal(got[1][n], g) for n, g in want[1].items())


def test_a_second_backward_over_a_kept_graph_gives_the_same(counted):
    model = model_of("llama")
    apply_checkpointing(model, Checkpointing("layers", (0, 1), 2, keep_attention=True))
    ids = torch.randint(3, 96, (1, 20), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward(retain_graph=True)
    first = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(p.grad, first[n]) for n, p in model.named_parameters() if p.grad is not None)
