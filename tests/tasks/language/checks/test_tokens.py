"""PF008, PF009, PF010: embeddings and templates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from isotype.errors import UsageError
from isotype.tasks.language.checks import beyond_the_embeddings, missing_template, untouched_rows, untrained_new_tokens

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def grown(workshop, tmp_path):
    """The workshop's model with two added tokens, which its template uses, resized as transformers does."""
    tokenizer = AutoTokenizer.from_pretrained(workshop.base)
    model = AutoModelForCausalLM.from_pretrained(workshop.base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    tokenizer.chat_template = TEMPLATE
    model.resize_token_embeddings(len(tokenizer), mean_resizing=True)
    model.save_pretrained(tmp_path / "grown")
    tokenizer.save_pretrained(tmp_path / "grown")
    return {"name": str(tmp_path / "grown")}


def test_right_rows_and_embeddings_get_no_finding(subject):
    one = subject()
    assert [*beyond_the_embeddings(one), *untrained_new_tokens(one), *missing_template(one)] == []


def test_an_id_behind_the_table(subject, with_data):
    one = subject()
    rows = list(one.task.data.train)
    (finding,) = beyond_the_embeddings(with_data(one, train=[replace(rows[0], input_ids=(*rows[0].input_ids[:-1], 9999)), *rows[1:]]))
    assert "token 9999" in finding.message


def test_a_tokenizer_that_is_too_large_names_the_page(subject, grown, workshop):
    with pytest.raises(UsageError, match="PF008"):
        subject(model={"name": str(workshop.base), "tokenizer": grown["name"]})


def test_new_tokens_under_a_frozen_embedding(subject, grown):
    (finding,) = untrained_new_tokens(subject(model=grown))
    assert "<|user|>" in finding.message
    assert "<|assistant|>" in finding.message


@pytest.mark.parametrize("adapter", [{"kind": "none"}, {"modules_to_save": ["embed_tokens", "lm_head"]}])
def test_new_tokens_that_are_trained(subject, grown, adapter):
    assert list(untrained_new_tokens(subject(model=grown, adapter=adapter))) == []


def test_rows_that_resizing_leaves():
    weight = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    weight[5] = weight.mean(0)
    assert untouched_rows(weight, [1, 3, 5, 7]) == [3, 5]
    assert untouched_rows(torch.ones(8, 4), [1]) == []


def test_chats_without_a_template(subject, workshop, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(workshop.base)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "bare")
    (finding,) = missing_template(subject(model={"name": str(workshop.base), "tokenizer": str(tmp_path / "bare")}))
    assert "plain one is used" in finding.message
