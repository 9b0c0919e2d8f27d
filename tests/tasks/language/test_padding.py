"""Right padding without a mask, and packed documents by their bounds alone: the loss and gradients of masks."""

import pytest
import torch

from isotype.data.rows import Row
from isotype.optimize.attention import why_mask_is_read
from isotype.tasks.language.batches import collate, model_inputs, next_tokens
from isotype.tasks.language.objective import batch_loss_sum
from tests.models import rows, tiny


def joined(documents, seed=0):
    ids = [tuple(range(3 + (seed + i) % 7, 3 + (seed + i) % 7 + n)) for i, n in enumerate(documents)]
    flat = tuple(x for part in ids for x in part)
    return Row(flat, flat, seed, documents=tuple(documents))


def packed():
    return collate([joined([40, 21, 3]), joined([9, 30], seed=1)], pad_id=0)


def unpacked():
    made = rows(3)
    return collate([Row(tuple(range(5, 75)), tuple(range(5, 75)), 9), *made], pad_id=0)


def result(model, batch, **inputs):
    model.zero_grad()
    if inputs:
        found = next_tokens(batch, every_row=True).of_logits(model(**inputs).logits)
    else:
        found = batch_loss_sum(model, batch)
    found.backward()
    return float(found), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same(one, other):
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    for name, g in one[1].items():
        torch.testing.assert_close(g, other[1][name], rtol=1e-4, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("gemma3_text", "eager")])
def test_right_padding_needs_no_mask_under_causal_attention(family, attention):
    window = {"sliding_window": 16} if family == "gemma3_text" else {}
    model, batch = tiny(family, attn_implementation=attention, **window), unpacked()
    assert int(batch.attention_mask.sum()) < batch.attention_mask.numel()
    assert why_mask_is_read(model) is None
    assert model_inputs(model, batch)["attention_mask"] is None
    same(result(model, batch), result(model, batch, **batch.inputs))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"output_router_logits": True}, "its routers' balancing loss leaves padding out"),
        ({"use_bidirectional_attention": True}, "its attention is bidirectional"),
        ({"is_encoder_decoder": True}, "its encoder attends to both sides"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "it has layers of linear_attention"),
    ],
    ids=str,
)
def test_a_model_that_uses_its_mask_elsewhere_gets_it(change, reason):
    model, batch = tiny("mixtral"), unpacked()
    for name, value in change.items():
        setattr(model.config, name, value)
    assert why_mask_is_read(model) == reason
    assert model_inputs(model, batch)["attention_mask"] is batch.attention_mask
