"""The checks of tokens before step 1, by their codes: each finds its fault, and right rows and
models get no finding.
"""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from isotype.data.rows import IGNORE_INDEX
from isotype.errors import PreflightError, UsageError
from isotype.finding import Severity
from isotype.precision.apply import inner_model
from isotype.tasks.choose import train
from tests.api import (
    check_chat_template,
    check_end_token,
    check_learnt_tokens,
    check_new_tokens,
    check_packing,
    check_positions,
    check_prompt_labels,
)

# --- labels


def masked(row):
    return replace(row, labels=(IGNORE_INDEX,) * len(row.labels))


def test_rows_that_are_all_masked(subject, with_data):
    one = subject()
    rows = list(one.task.data.train)
    half = with_data(one, train=[*map(masked, rows[:20]), *rows[20:]])
    (finding,) = check_learnt_tokens(half)
    assert finding.severity == Severity.WARNING
    assert finding.message.startswith(f"20 of {len(rows)} training rows")
    (finding,) = check_learnt_tokens(with_data(one, train=list(map(masked, rows))))
    assert finding.severity == Severity.ERROR


def test_answers_that_were_cut_away(subject, tmp_path):
    rows = [
        {"prompt": "How much is one plus two? " * (30 if i % 2 else 1), "completion": "three"}
        for i in range(40)
    ]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (finding,) = check_learnt_tokens(
        subject(data={"train": str(tmp_path / "long.jsonl"), "eval_split": 0.0})
    )
    assert finding.message.startswith("20 of 40 training rows")
    assert "long.jsonl" in str(finding.cause)


def test_prompts_that_are_learnt(subject, with_data):
    one = subject()
    whole = [replace(row, labels=row.input_ids) for row in one.task.data.train]
    (finding,) = check_prompt_labels(with_data(one, train=whole))
    assert finding.severity == Severity.ERROR
    meant = subject("meant", data={"loss_on": "all"})
    assert list(check_prompt_labels(meant)) == []


def test_an_end_that_is_masked_as_padding_is(subject, with_data):
    """What a collator does that masks every padding token, where padding is the end token."""
    one = subject()
    tokenizer = one.task.tokenizer
    tokenizer.pad_token = tokenizer.eos_token
    end = tokenizer.eos_token_id
    assert list(check_end_token(one)) == []
    rows = [
        replace(
            r,
            labels=tuple(
                IGNORE_INDEX if i == end else n for i, n in zip(r.input_ids, r.labels, strict=True)
            ),
        )
        for r in one.task.data.train
    ]
    (finding,) = check_end_token(with_data(one, train=rows))
    assert finding.severity == Severity.ERROR
    assert "padding token is the same" in str(finding.cause)


def test_a_template_that_closes_turns_with_another_token(subject, workshop, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(workshop.base)
    tokenizer.eos_token = tokenizer.pad_token  # <|endoftext|>, while turns end with <|im_end|>
    tokenizer.save_pretrained(tmp_path / "other")
    settings = json.loads((workshop.base / "config.json").read_text()) | {
        "eos_token_id": tokenizer.eos_token_id
    }
    model = {
        "init": "random",
        "name": None,
        "config": settings,
        "tokenizer": str(tmp_path / "other"),
    }
    (finding,) = check_end_token(subject(model=model))
    assert finding.severity == Severity.WARNING
    assert "'<|im_end|>', at which generation does not stop" in str(finding.cause)
    command = str(finding.fix).partition('python -c "')[2].removesuffix('"')
    exec(command.replace("'ended'", repr(str(tmp_path / "ended"))))
    assert (
        list(check_end_token(subject(model=model | {"tokenizer": str(tmp_path / "ended")}))) == []
    )


# --- tokens


TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"  # noqa: E501


@pytest.fixture
def grown(workshop, tmp_path):
    """The workshop's model with two added tokens, which its template uses, resized as transformers
    does.
    """
    tokenizer = AutoTokenizer.from_pretrained(workshop.base)
    model = AutoModelForCausalLM.from_pretrained(workshop.base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    tokenizer.chat_template = TEMPLATE
    model.resize_token_embeddings(len(tokenizer), mean_resizing=True)
    model.save_pretrained(tmp_path / "grown")
    tokenizer.save_pretrained(tmp_path / "grown")
    return {"name": str(tmp_path / "grown")}


def test_a_tokenizer_that_is_too_large_names_the_page(subject, grown, workshop):
    with pytest.raises(UsageError, match="PF008"):
        subject(model={"name": str(workshop.base), "tokenizer": grown["name"]})


def test_new_tokens_under_a_frozen_embedding(subject, grown):
    (finding,) = check_new_tokens(subject(model=grown))
    assert "<|user|>" in finding.message
    assert "<|assistant|>" in finding.message
    trained = subject(
        "trained", model=grown, adapter={"modules_to_save": ["embed_tokens", "lm_head"]}
    )
    assert list(check_new_tokens(trained)) == []


def test_chats_without_a_template(subject, workshop, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(workshop.base)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "bare")
    (finding,) = check_chat_template(
        subject(model={"name": str(workshop.base), "tokenizer": str(tmp_path / "bare")})
    )
    assert "plain one is used" in finding.message


# --- positions


def test_rotary_positions_are_a_warning(subject, workshop, tmp_path):
    assert list(check_positions(subject("enough"))) == []
    short = tmp_path / "short"
    shutil.copytree(workshop.base, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8}))
    (finding,) = check_positions(subject("short", model={"name": str(short)}))
    assert (finding.code, finding.severity) == ("PF020", Severity.WARNING)
    assert finding.fix.startswith("data.max_length: 8;")


def test_a_table_that_ends_is_refused(configured, workshop):
    config = {
        "model_type": "gpt2",
        "n_positions": 8,
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
        "vocab_size": 512,
    }
    model = {"name": None, "init": "random", "config": config, "tokenizer": str(workshop.base)}
    with pytest.raises(PreflightError, match=r"PF020.*and the model has 8 positions"):
        train(configured(model=model, adapter={"kind": "none"}))


# --- packing


PACKED = {"packing": True, "max_length": 128}


class Running(torch.nn.Module):
    """A mean over everything before, as a recurrent state is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]


def test_a_state_along_the_row_is_found(subject):
    one = subject(data=PACKED)
    assert list(check_packing(one)) == []
    model = inner_model(one.prepared.model).model
    model.norm = torch.nn.Sequential(Running(), model.norm)
    (found,) = check_packing(one)
    assert found.code == "PF018"
    assert found.fix == "data.packing: false"
    plain = subject("plain")
    assert list(check_packing(plain)) == []
