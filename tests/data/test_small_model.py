"""The small model's tokenizer and configuration are ordinary Hugging Face ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from isotype.config.schema import DataSection
from isotype.data.load import load_data
from isotype.data.rows import IGNORED
from isotype.data.small_model import small_config, train_tokenizer
from isotype.data.stdlib import stdlib_text
from isotype.errors import UsageError


@pytest.fixture(scope="module")
def tokenizer() -> object:
    return train_tokenizer(stdlib_text()[:300], vocabulary=600)


def test_it_saves_and_loads_as_any_model(tokenizer, tmp_path: Path) -> None:
    config = small_config(tokenizer, hidden=64, layers=1)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, again = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.vocab_size == len(again) == 600
    assert model.generation_config.eos_token_id == again.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert again.chat_template == tokenizer.chat_template


def test_its_chats_end_in_the_token_it_stops_at(tokenizer) -> None:
    row = load_data(DataSection(train="stdlib", limit=1), tokenizer, seed=0).train[0]
    learnt = [label for label in row.labels if label != IGNORED]
    assert learnt[-1] == tokenizer.eos_token_id
    assert learnt.count(tokenizer.eos_token_id) == 1


def test_a_vocabulary_smaller_than_the_bytes_is_refused() -> None:
    with pytest.raises(UsageError, match="259"):
        train_tokenizer(["a"], vocabulary=100)
