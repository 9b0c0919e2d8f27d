"""Attention on a CPU: the op where it serves, the model's own function everywhere else, and the
model's own result always.
"""

import copy
import functools

import pytest
import torch
from transformers import logging

from isotype.ops import cpp
from isotype.optimize import optimize
from tests.api import optimize_attention as placed
from tests.ops.trials import FACTOR, error
from tests.optimize.models import batch, tiny

logging.set_verbosity_error()
pytestmark = pytest.mark.skipif(cpp.cpu_compiler() is None, reason="no C++ compiler")
SDPA = {
    "attn_implementation": "sdpa",
    "head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture
def calls(monkeypatch):
    """The queries of each call of the op."""
    seen: list[int] = []
    real = placed.kernel_attention

    def counted(query, *given, **options):
        made = real(query, *given, **options)
        if made is not None:
            seen.append(query.shape[2])
        return made

    monkeypatch.setattr(placed, "kernel_attention", counted)
    return seen


def padded(length=75):
    inputs = batch(rows=3, length=length)
    inputs["attention_mask"][1, length - 20 :] = 0
    inputs["labels"][1, length - 20 :] = -100
    return inputs


def gradients(model, inputs):
    model.zero_grad()
    model(**inputs).loss.backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def test_gradients_are_as_near_to_fp64_as_the_models_own(calls):
    as_near("llama", whole=False)
    as_near("gemma3_text", whole=True)
    assert calls == [75, 75] * 2


def as_near(family, *, whole):
    model = tiny(
        family,
        dtype=torch.bfloat16,
        **SDPA,
        **({"sliding_window": 30} if family == "gemma3_text" else {}),
    ).train()
    mine, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    assert ("attention", "attention") in {(e.part, e.op) for e in optimize(mine).replaced}
    inputs = batch(rows=3, length=75) if whole else padded()
    truth = gradients(exact, inputs)
    theirs, ours = error(gradients(model, inputs), truth), error(gradients(mine, inputs), truth)
    assert ours <= FACTOR * theirs


def test_what_the_op_does_not_do_is_left_to_the_model(calls):
    for more, dtype, length in (
        ({"attention_dropout": 0.1}, torch.bfloat16, 40),
        ({}, torch.float32, 40),
        ({}, torch.bfloat16, 20),  # few queries
        ({"head_dim": 12}, torch.bfloat16, 40),
    ):
        model = tiny("llama", dtype=dtype, **{**SDPA, **more}).train()
        optimize(model)
        assert model(**batch(length=length)).loss.isfinite()
        assert not calls, (more, dtype, length)


def test_autocast_decides_the_dtype(calls):
    model = tiny("llama", **SDPA).train()
    optimize(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(**batch(length=40)).loss.backward()
    assert calls == [40, 40]
    model(**batch(length=40))
    assert calls == [40, 40]


def test_a_decorated_forward_keeps_its_decorator(calls, monkeypatch):
    """transformers 5.24 decorates the forward of attention with `deprecate_kwarg`."""
    model = tiny("llama", dtype=torch.bfloat16, **SDPA).train()
    attention = type(model.model.layers[0].self_attn)
    counts = []

    def count(forward):
        @functools.wraps(forward)
        def counted(*args, **kwargs):
            counts.append(len(args))
            return forward(*args, **kwargs)

        return counted

    monkeypatch.setattr(attention, "forward", count(attention.forward))
    placed_ops = {(entry.part, entry.op) for entry in optimize(model).replaced}
    assert {("attention", "attention"), ("rotary", "rope")} <= placed_ops
    assert model(**batch(length=40)).loss.isfinite()
    assert calls == [40, 40]
    assert len(counts) == 2

    def call_by_name(forward):
        @functools.wraps(forward)
        def called(self, *args, **kwargs):
            return attention.__dict__["forward"].__wrapped__(self, *args, **kwargs)

        return called

    # the function that this decorator runs cannot be replaced
    monkeypatch.setattr(attention, "forward", call_by_name(attention.forward))
    placements = optimize(tiny("llama", dtype=torch.bfloat16, **SDPA).train()).left
    assert {"rotary", "attention"} <= {entry.part for entry in placements}


def test_a_position_bias_is_the_models():
    """T5-likes hand a tensor to the attention function; without dropout 40 queries would be the
    op's to compute.
    """
    from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM

    torch.manual_seed(0)
    config = CONFIG_MAPPING["t5"](
        vocab_size=96, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    model = (
        AutoModelForSeq2SeqLM.from_config(config, attn_implementation="sdpa")
        .to(torch.bfloat16)
        .eval()
    )
    mine = copy.deepcopy(model)
    assert any(e.op == "attention" for e in optimize(mine).replaced)
    ids = torch.randint(3, 96, (2, 40), generator=torch.Generator().manual_seed(0))
    losses = [each(input_ids=ids, labels=ids).loss for each in (model, mine)]
    torch.testing.assert_close(losses[1].detach() * 1, losses[0].detach(), rtol=2e-2, atol=2e-2)
    losses[1].backward()
    assert mine.generate(input_ids=ids, max_new_tokens=3, do_sample=False).shape[1] > 1
