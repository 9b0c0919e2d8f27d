"""Rows of an epoch, their padding, FLOPs, and samples that leave no trace."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BitsAndBytesConfig

from isotype.data.rows import IGNORED, Row, SamplePrompt, Share
from isotype.optimize.attention import why_mask_is_read
from isotype.precision import PRESETS
from isotype.tasks.language.batches import collate, model_inputs, next_tokens
from isotype.tasks.language.objective import batch_loss_sum
from isotype.tasks.language.result import evaluate
from isotype.tasks.language.sample import sample
from isotype.tasks.language.task import step_flops
from isotype.training.feed import mixed_order
from isotype.training.memory.recomputation import Checkpointing, apply_checkpointing
from tests.models import lora, rows, stepper, tiny


def test_collate_pads_to_a_multiple_of_eight_and_supervises_no_padding():
    batch = collate([Row((5, 6, 7), (IGNORED, 6, 7), 1), Row((5,) * 9, (5,) * 9, 0)], pad_id=0)
    assert tuple(batch.input_ids.shape) == (2, 16)
    assert batch.tokens == 12
    assert batch.supervised == 2 + 8  # the first label of a row predicts nothing
    assert batch.labels[0, 3:].eq(IGNORED).all()
    assert batch.attention_mask.sum() == 12


shares = st.lists(st.tuples(st.integers(1, 30), st.floats(0.1, 10.0)), min_size=2, max_size=4).map(lambda pairs: [Share(*p) for p in pairs])


@pytest.mark.full
@given(shares, st.integers(0, 4), st.booleans())
def test_an_epoch_of_weighted_sources_has_their_shares(mix, epoch, shuffle):
    order = mixed_order(mix, seed=3, epoch=epoch, shuffle=shuffle)
    total, weight, begin = sum(s.rows for s in mix), sum(s.weight for s in mix), 0
    assert len(order) == total
    for share in mix:
        count = sum(begin <= i < begin + share.rows for i in order)
        assert abs(count - total * share.weight / weight) < 1
        begin += share.rows


def test_a_weighted_source_goes_on_where_the_last_epoch_left_it():
    mix = [Share(10, 3.0), Share(30, 1.0)]  # the small one comes three times an epoch, of the large one a third
    epochs = [mixed_order(mix, seed=0, epoch=e, shuffle=True) for e in range(3)]
    assert [sorted(i for i in epoch if i < 10) for epoch in epochs] == [sorted([*range(10)] * 3)] * 3
    large = [i for epoch in epochs for i in epoch if i >= 10]
    assert sorted(large) == list(range(10, 40)), "three epochs of a third are every row once"


# --- FLOPs of a step, by hand.


def test_attention_is_counted_by_the_layers_own_heads():
    plain = tiny("llama")  # 2 layers of 4 heads of 8
    assert step_flops(plain, plain.config).per_square == 6 * 2 * 4 * 8
    # two sliding layers of 4 heads of 8, a full one of 4 heads of 16: transformers refuses to name one size for all
    differing = tiny("gemma4_unified_text", num_hidden_layers=3, head_dim=8, global_head_dim=16)
    assert step_flops(differing, differing.config).per_square == 6 * 4 * (8 + 8 + 16)
    products = [m for m in differing.modules() if isinstance(m, torch.nn.Linear)]
    assert step_flops(differing, differing.config).per_token == 6 * sum(m.weight.numel() for m in products)


def test_of_stacked_experts_those_are_counted_that_a_token_is_sent_to():
    model = tiny("mixtral")  # two of four experts
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    stacked = sum(p.numel() for p in model.parameters() if p.dim() == 3)
    assert step_flops(model, model.config).per_token == 6 * linear + 6 * stacked / 2


# --- Right padding without a mask, and packed documents by their bounds alone: the loss and gradients of masks.


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


# --- Samples in the middle of training leave no trace: "train, generate, train" is bit-identical to "train, train".


class WordTokenizer:
    """As much of a tokenizer as sampling needs."""

    eos_token_id, pad_token_id = 2, 0

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(str(int(i)) for i in ids)


def quantised(folder):
    """A tiny Llama in nf4. Its sizes are multiples of the block of 64, as those of real models are."""
    tiny(hidden_size=64, intermediate_size=128).save_pretrained(folder)
    from transformers import AutoModelForCausalLM

    quantisation = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantisation, dtype=torch.bfloat16)


def trained(preset, folder, *, interludes, checkpointing=False):
    model = quantised(folder) if preset == "nf4-lora" else tiny()
    if checkpointing:
        apply_checkpointing(model, Checkpointing("layers", (0, 1), 2))
    if preset.endswith("lora"):
        model = lora(model, lora_dropout=0.1)
    step_of = stepper(model, preset, learning_rate=1e-3)
    torch.manual_seed(7)
    prompts = [SamplePrompt("one", (3, 4, 5)), SamplePrompt("two", (6, 7))]
    every, losses = rows(12), []
    for step in range(4):
        model.train()
        batch = collate(every[step * 3 : step * 3 + 3], pad_id=0)
        losses.append(step_of([batch], step=step + 1, learning_rate=1e-3, watch_changes=True).loss)
        if interludes:
            answers = sample(model, WordTokenizer(), prompts, max_new_tokens=5, device=torch.device("cpu"))
            assert len(answers) == 2
            assert all(a.answer for a in answers)
            evaluate(model, every, batch_size=4, pad_id=0, device=torch.device("cpu"))
    return losses, {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("preset", "checkpointing"),
    [("bf16-mixed", False), ("bf16-lora", False), ("nf4-lora", True), ("fp16-mixed", False)]
    + [pytest.param(preset, True, marks=pytest.mark.full) for preset in PRESETS],
)
def test_generation_and_evaluation_leave_no_trace(preset, checkpointing, tmp_path):
    plain = trained(preset, tmp_path, interludes=False, checkpointing=checkpointing)
    with_interludes = trained(preset, tmp_path, interludes=True, checkpointing=checkpointing)
    assert plain[0] == with_interludes[0]
    assert all(torch.equal(plain[1][name], tensor) for name, tensor in with_interludes[1].items())
