"""Packed rows are learnt as if each document stood alone: on every attention back end that runs on a CPU, with the same loss."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from isotype.data.rows import Row
from isotype.data.tokens import joined
from isotype.optimize import optimize
from isotype.optimize.attention import FEW
from isotype.precision import PRESETS
from isotype.precision.apply import apply_precision
from isotype.tasks.language.batches import Batch, collate, takes_one_row
from isotype.tasks.language.objective import batch_loss_sum
from tests.models import FAMILIES, lora, rows, tiny

CPU = torch.device("cpu")
BACK_ENDS = ["eager", "sdpa", "flex_attention", "isotype"]  # flash needs a GPU and its package: see test_one_row_for_varlen


# every back end with one family, and every family with one back end; the rest of the matrix is left to `make test-full`
SLICE = {*(("llama", attention) for attention in BACK_ENDS), ("gemma2", "eager"), ("qwen3", "sdpa")}
LEFT_OUT = {
    # transformers has no sdpa for gemma2, whose scores are capped, and no flex attention for olmoe
    ("gemma2", "sdpa"), ("gemma2", "isotype"), ("olmoe", "flex_attention"),
    # its queries have a part without positions, which the heads of 16 do not fit
    ("deepseek_v3", "isotype"),
    # its windows let packed documents see each other, and PF018 refuses the run
    *(("gpt_oss", attention) for attention in BACK_ENDS),
}  # fmt: skip
CASES = [
    case if case in SLICE else pytest.param(*case, marks=pytest.mark.full) for case in product(FAMILIES, BACK_ENDS) if case not in LEFT_OUT
]


def model_of(family: str, attention: str, **changes: Any) -> Any:
    if attention == "isotype":
        # our own op is bf16's, in place of sdpa, for heads of 16 and their multiples
        model = tiny(family, **{**changes, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}).to(torch.bfloat16)
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
    """Two packed rows of unequal length, three documents each; with `changed`, the middle document of the first has other words."""
    documents = rows(6, seed=3)
    if changed:
        middle = documents[1]
        documents[1] = Row(middle.input_ids[::-1], middle.labels, middle.prompt_length)
    return joined(documents[:3]), joined(documents[3:]), documents


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Flex attention and its masks without Inductor, which takes minutes for them on a CPU."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask", "ignore:flex_attention called without")
@pytest.mark.parametrize(("family", "attention"), CASES)
def test_no_document_sees_another(family: str, attention: str, uncompiled: None) -> None:
    model = model_of(family, attention)
    first, second, documents = packed_three()
    as_is = logits(model, collate([first, second], pad_id=0))
    changed = logits(model, collate([packed_three(changed=True)[0], second], pad_id=0))
    begin, end = first.documents[0], first.documents[0] + first.documents[1]
    assert sum(first.documents) >= FEW, "the op would not run"
    assert not torch.equal(as_is[0, begin:end], changed[0, begin:end]), "the change must be seen somewhere"
    assert torch.equal(as_is[0, :begin], changed[0, :begin])
    assert torch.equal(as_is[0, end : sum(first.documents)], changed[0, end : sum(first.documents)])
    assert torch.equal(as_is[1], changed[1])
    # each document's logits are those that it has alone, up to the rounding of longer sums
    at, rounding = 0, 2e-5 if as_is.dtype == torch.float32 else 2 * torch.finfo(as_is.dtype).eps * float(as_is.abs().max())
    for document in documents[:3]:
        alone = logits(model, collate([document], pad_id=0))[0, : len(document.input_ids)]
        torch.testing.assert_close(as_is[0, at : at + len(document.input_ids)], alone, rtol=0, atol=rounding)
        at += len(document.input_ids)


@pytest.mark.parametrize("optimized", [False, True])
def test_loss_and_gradients_are_the_unpacked_ones(optimized: bool) -> None:
    documents = rows(6, seed=5)
    packed = [joined(documents[:4]), joined(documents[4:])]
    sums, gradients, counts = [], [], []
    for batch in (collate(documents, pad_id=0), collate(packed, pad_id=0)):
        model = lora(tiny("qwen2"))
        if optimized:
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
    """FlashAttention takes packed rows in a single row: the same logits and loss, on a back end that runs here."""
    model = model_of("llama", "sdpa")
    batch = collate(packed_three()[:2], pad_id=0)
    one = batch.as_one_row()
    assert one.input_ids.shape == (1, batch.input_ids.numel())
    torch.testing.assert_close(logits(model, one).view_as(logits(model, batch)), logits(model, batch), rtol=0, atol=2e-5)
    with torch.no_grad():
        assert float(batch_loss_sum(model, one)) == pytest.approx(float(batch_loss_sum(model, batch)), rel=1e-6)
    assert not takes_one_row(model)
    model.config._attn_implementation = "flash_attention_2"
    assert takes_one_row(model)
