"""Rows of an epoch, their padding, FLOPs, and samples that leave no trace."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from isotype.data.rows import Row, Share, mixed_order
from isotype.optimize import optimize
from isotype.precision import PRESETS
from isotype.precision.apply import apply_precision
from isotype.tasks.choose import train
from isotype.tasks.language.batches import (
    Batch,
    collate,
    mean_longest,
    model_inputs,
    needs_single_packed_row,
    next_tokens,
    shortest_rows,
)
from isotype.tasks.language.objective import batch_loss_sum
from isotype.tasks.language.task import flops_per_token
from tests.api import MIN_QUERIES, DocumentMask, join_rows, padding_mask_reason
from tests.models import FAMILIES, lora, rows, tiny
from tests.results import same_tensors


def test_mean_longest_is_the_mean_over_all_choices_of_rows():
    lengths = [7, 3, 3, 10]
    longest = [max(pair) for pair in itertools.product(lengths, repeat=2)]
    assert mean_longest(lengths, 2) == pytest.approx(sum(longest) / len(longest))
    assert mean_longest(lengths, 1) == pytest.approx(23 / 4)
    assert mean_longest([], 2) == 0


def test_a_weighted_source_goes_on_where_the_last_epoch_left_it():
    # the small one comes three times an epoch, of the large one a third
    mix = [Share(10, 3.0), Share(30, 1.0)]
    epochs = [mixed_order(mix, seed=0, epoch=e, shuffle=True) for e in range(3)]
    assert [sorted(i for i in epoch if i < 10) for epoch in epochs] == [
        sorted([*range(10)] * 3)
    ] * 3
    large = [i for epoch in epochs for i in epoch if i >= 10]
    assert sorted(large) == list(range(10, 40)), "three epochs of a third are every row once"


# --- FLOPs of a token, by hand.


def test_a_check_takes_the_shortest_rows_and_those_with_pictures_first():
    texts = [Row((1,) * length, (1,) * length, 0) for length in (5, 3, 4)]
    with_picture = Row((1,) * 9, (1,) * 9, 0, pictures=("digest 1 file",))
    assert shortest_rows(texts, 2) == [texts[1], texts[2]]
    assert shortest_rows([*texts, with_picture], 2) == [with_picture, texts[1]]


def test_a_token_is_counted_in_every_product():
    differing = tiny("gemma4_unified_text", num_hidden_layers=3, head_dim=8, global_head_dim=16)
    products = [m for m in differing.modules() if isinstance(m, torch.nn.Linear)]
    assert flops_per_token(differing, differing.config) == 6 * sum(
        m.weight.numel() for m in products
    )


def test_of_stacked_experts_those_are_counted_that_a_token_is_sent_to():
    model = tiny("mixtral")  # two of four experts
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    stacked = sum(p.numel() for p in model.parameters() if p.dim() == 3)
    assert flops_per_token(model, model.config) == 6 * linear + 6 * stacked / 2


# --- Right padding without a mask, and packed documents by their bounds alone: the loss and
# gradients of masks.


HEADS_OF_16 = {"attn_implementation": "sdpa", "head_dim": 16, "num_attention_heads": 2}


def of_lengths(documents, seed=0):
    ids = [
        tuple(range(3 + (seed + i) % 7, 3 + (seed + i) % 7 + n)) for i, n in enumerate(documents)
    ]
    flat = tuple(x for part in ids for x in part)
    return Row(flat, flat, seed, documents=tuple(documents))


def packed():
    return collate([of_lengths([40, 21, 3]), of_lengths([9, 30], seed=1)], pad_id=0)


def unpacked():
    made = rows(3)
    return collate([Row(tuple(range(5, 75)), tuple(range(5, 75)), 9), *made], pad_id=0)


def result(model, batch, **inputs):
    model.zero_grad()
    if inputs:
        found = next_tokens(batch, every_row=True).loss_from_logits(model(**inputs).logits)
    else:
        found = batch_loss_sum(model, batch)
    found.backward()
    return float(found), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def same(one, other):
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    for name, g in one[1].items():
        torch.testing.assert_close(
            g, other[1][name], rtol=1e-4, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("gemma3_text", "eager")])
def test_right_padding_needs_no_mask_under_causal_attention(family, attention):
    window = {"sliding_window": 16} if family == "gemma3_text" else {}
    model, batch = tiny(family, attn_implementation=attention, **window), unpacked()
    assert int(batch.attention_mask.sum()) < batch.attention_mask.numel()
    assert padding_mask_reason(model) is None
    assert model_inputs(model, batch)["attention_mask"] is None
    same(result(model, batch), result(model, batch, **batch.inputs))


def test_windows_shorter_than_the_rows_are_computed_from_bounds():
    """Rows of different lengths that are not packed: the results are those of transformers' mask."""
    model, batch = tiny("gemma3_text", sliding_window=20, **HEADS_OF_16), unpacked()
    optimize(model)
    assert isinstance(model_inputs(model, batch)["attention_mask"], DocumentMask)
    same(result(model, batch), result(model, batch, **batch.inputs))
    # in bf16 the kernel computes both, and leaves out blocks of keys before the windows
    model.to(torch.bfloat16)
    states = []
    gradients = []
    for inputs in (batch.inputs, model_inputs(model, batch)):
        model.zero_grad()
        states.append(model.model(**inputs).last_hidden_state[batch.attention_mask.bool()])
        states[-1].square().sum().backward()
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad.clone())
    assert torch.equal(*states)
    assert torch.equal(*gradients)
    longer = tiny("gemma3_text", sliding_window=100, **HEADS_OF_16)
    optimize(longer)
    assert model_inputs(longer, batch)["attention_mask"] is None


def test_a_model_that_uses_its_mask_elsewhere_gets_it():
    batch = unpacked()
    for change, reason in (
        ({"output_router_logits": True}, "its routers' balancing loss leaves padding out"),
        ({"use_bidirectional_attention": True}, "its attention is bidirectional"),
        ({"is_encoder_decoder": True}, "its encoder attends to both sides"),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            "it has layers of linear_attention",
        ),
    ):
        model = tiny("mixtral")
        model.config.update(change)
        assert padding_mask_reason(model) == reason
        assert model_inputs(model, batch)["attention_mask"] is batch.attention_mask


@pytest.mark.parametrize(
    ("preset", "recompute"),
    [
        pytest.param("bf16-mixed", "none", marks=pytest.mark.full),
        *(pytest.param(preset, "layers", marks=pytest.mark.full) for preset in PRESETS),
    ],
)
def test_samples_and_evaluation_leave_no_trace(configured, tmp_path, preset, recompute):
    """A run that answers and evaluates at every step trains what one does that never does."""
    adapter = (
        {"kind": "lora", "r": 4, "dropout": 0.1} if preset.endswith("lora") else {"kind": "none"}
    )
    for name, every, prompts in (
        ("quiet", 6, []),
        ("asked", 1, ["How much is 1 plus 1?", "How much is 2 plus 3?"]),
    ):
        steps = {"steps": 4, "gradient_checkpointing": recompute, "eval_every": every}
        run = {"samples": prompts, "sample_every": every if prompts else 0}
        assert (
            train(
                configured(
                    name, precision={"preset": preset}, adapter=adapter, train=steps, run=run
                )
            )
            == 0
        )
    assert len(list((tmp_path / "asked/samples").iterdir())) >= 4
    same_tensors(tmp_path / "quiet", tmp_path / "asked")


# --- Packed rows are learnt as if each document stood alone: on every attention back end that runs
# on a CPU, with the same loss.


CPU = torch.device("cpu")
# flash needs a GPU and its package: see test_one_row_for_varlen
BACK_ENDS = ["eager", "sdpa", "flex_attention", "isotype"]


# every back end with one family, and families whose attention has another form; gpt_oss is refused
# by PF018
CASES = [
    *(("llama", attention) for attention in BACK_ENDS), pytest.param("gemma2", "eager", marks=pytest.mark.full),
    *(pytest.param(f, "sdpa", marks=pytest.mark.full) for f in FAMILIES if f not in ("llama", "gemma2", "gpt_oss")),
]  # fmt: skip


def model_of(family: str, attention: str, **changes: Any) -> Any:
    if attention == "isotype":
        # our own op is bf16's, in place of sdpa, for heads of 16 and their multiples
        model = tiny(
            family,
            **{**changes, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
        ).to(torch.bfloat16)
        model.set_attn_implementation("sdpa")
        assert "attention" in {entry.op for entry in optimize(model).entries}
    else:
        model = tiny(family, **changes)
        model.set_attn_implementation(attention)
    return model.eval()


def logits(model: Any, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch.inputs).logits


def packed_three(changed: bool = False) -> tuple[Row, Row, list[Row]]:
    """Two packed rows of unequal length, three documents each; with `changed`, the middle document
    of the first has other words.
    """
    documents = rows(6, seed=3)
    if changed:
        middle = documents[1]
        documents[1] = Row(middle.input_ids[::-1], middle.labels, middle.prompt_length)
    return join_rows(documents[:3]), join_rows(documents[3:]), documents


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Flex attention and its masks without Inductor, which takes minutes for them on a CPU."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.filterwarnings(
    "ignore:_compile flag on create_block_mask", "ignore:flex_attention called without"
)
@pytest.mark.parametrize(("family", "attention"), CASES)
def test_no_document_sees_another(family: str, attention: str, uncompiled: None) -> None:
    model = model_of(family, attention)
    first, second, documents = packed_three()
    as_is = logits(model, collate([first, second], pad_id=0))
    changed = logits(model, collate([packed_three(changed=True)[0], second], pad_id=0))
    begin, end = first.documents[0], first.documents[0] + first.documents[1]
    assert sum(first.documents) >= MIN_QUERIES, "the op would not run"
    assert not torch.equal(as_is[0, begin:end], changed[0, begin:end]), (
        "the change must be seen somewhere"
    )
    assert torch.equal(as_is[0, :begin], changed[0, :begin])
    assert torch.equal(as_is[0, end : sum(first.documents)], changed[0, end : sum(first.documents)])
    assert torch.equal(as_is[1], changed[1])
    # each document's logits are those that it has alone, up to the rounding of longer sums
    at, rounding = (
        0,
        2e-5
        if as_is.dtype == torch.float32
        else 2 * torch.finfo(as_is.dtype).eps * float(as_is.abs().max()),
    )
    for document in documents[:3]:
        alone = logits(model, collate([document], pad_id=0))[0, : len(document.input_ids)]
        torch.testing.assert_close(
            as_is[0, at : at + len(document.input_ids)], alone, rtol=0, atol=rounding
        )
        at += len(document.input_ids)


def test_loss_and_gradients_are_the_unpacked_ones() -> None:
    documents = rows(6, seed=5)
    packed = [join_rows(documents[:4]), join_rows(documents[4:])]
    sums, gradients, counts = [], [], []
    for batch in (collate(documents, pad_id=0), collate(packed, pad_id=0)):
        model = lora(tiny("qwen2"))
        optimize(model, PRESETS["fp32"])
        apply_precision(model, PRESETS["fp32"], device_type="cpu")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(len(name)))
        loss = batch_loss_sum(model, batch)
        loss.backward()
        sums.append(loss.detach())
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
        counts.append(batch.supervised)
    assert counts[0] == counts[1] == sum(row.supervised for row in documents)
    torch.testing.assert_close(sums[1], sums[0], rtol=1e-6, atol=0)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5)


def test_one_row_for_varlen() -> None:
    """FlashAttention takes packed rows in a single row: the same logits and loss, on a back end
    that runs here.
    """
    model = model_of("llama", "sdpa")
    batch = collate(packed_three()[:2], pad_id=0)
    one = batch.join_packed_rows()
    assert one.input_ids.shape == (1, batch.input_ids.numel())
    torch.testing.assert_close(
        logits(model, one).view_as(logits(model, batch)), logits(model, batch), rtol=0, atol=2e-5
    )
    with torch.no_grad():
        assert float(batch_loss_sum(model, one)) == pytest.approx(
            float(batch_loss_sum(model, batch)), rel=1e-6
        )
    assert not needs_single_packed_row(model)
    model.config._attn_implementation = "flash_attention_2"
    assert needs_single_packed_row(model)
