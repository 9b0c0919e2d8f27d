"""`train.keep_attention`: attention whose results were kept does not run again in backward, and no gradient changes."""

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
    """How often attention's kernel ran."""
    seen, real = [], cpu.attention_forward
    monkeypatch.setattr(op.cpu, "attention_forward", lambda *args: seen.append(1) or real(*args))
    return seen


@pytest.mark.skipif(ops_cpp.cpu_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(("kind", "keep"), [("layers", False), ("layers", True), ("layers+offload", True)])
def test_attention_whose_results_were_kept_does_not_run_again(counted, keep, kind):
    model = model_of("llama", torch.bfloat16, **BF16)
    want = gradients(model)
    counted.clear()
    got = gradients(model, kind=kind, keep_attention=keep)
    # two layers; without keeping, each once more in backward
    assert len(counted) == (2 if keep else 4)
    assert torch.equal(got[0], want[0])
    assert all(torch.equal(got[1][n], g) for n, g in want[1].items())
