"""PF005, PF006, PF007: masks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from isotype.data.rows import IGNORED
from isotype.finding import Severity
from isotype.tasks.language.checks import end_never_learnt, nothing_to_learn, prompts_learnt


def masked(row):
    return replace(row, labels=(IGNORED,) * len(row.labels))


def test_right_rows_get_no_finding(subject):
    one = subject()
    assert [*nothing_to_learn(one), *prompts_learnt(one), *end_never_learnt(one)] == []


def test_plain_text_is_learnt_whole_and_rightly(subject, tmp_path):
    (tmp_path / "book.txt").write_text("one plus two is three. " * 400)
    one = subject(data={"train": str(tmp_path / "book.txt")})
    assert [*nothing_to_learn(one), *prompts_learnt(one), *end_never_learnt(one)] == []


def test_rows_that_are_all_masked(subject, with_data):
    one = subject()
    rows = list(one.task.data.train)
    half = with_data(one, train=[*map(masked, rows[:20]), *rows[20:]])
    (finding,) = nothing_to_learn(half)
    assert finding.severity == Severity.WARNING
    assert finding.message.startswith(f"20 of {len(rows)} training rows")
    (finding,) = nothing_to_learn(with_data(one, train=list(map(masked, rows))))
    assert finding.severity == Severity.ERROR


def test_answers_that_were_cut_away(subject, tmp_path):
    rows = [{"prompt": "How much is one plus two? " * (30 if i % 2 else 1), "completion": "three"} for i in range(40)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (finding,) = nothing_to_learn(subject(data={"train": str(tmp_path / "long.jsonl"), "eval_split": 0.0}))
    assert finding.message.startswith("20 of 40 training rows")
    assert "long.jsonl" in str(finding.cause)


def test_the_advice_for_empty_answers_is_not_a_larger_max_length(subject, tmp_path):
    rows = [{"prompt": "How much is one plus two?", "completion": "" if i % 4 == 0 else "three"} for i in range(40)]
    (tmp_path / "empty.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (finding,) = nothing_to_learn(subject(data={"train": str(tmp_path / "empty.jsonl"), "eval_split": 0.0}))
    assert "the answer is empty" in str(finding.cause)
    assert "max_length" not in str(finding.fix)


def test_prompts_that_are_learnt(subject, with_data):
    one = subject()
    whole = [replace(row, labels=row.input_ids) for row in one.task.data.train]
    (finding,) = prompts_learnt(with_data(one, train=whole))
    assert finding.severity == Severity.ERROR
    meant = subject("meant", data={"loss_on": "all"})
    assert list(prompts_learnt(meant)) == []


def test_an_end_that_is_masked_as_padding_is(subject, with_data):
    """What a collator does that masks every padding token, where padding is the end token."""
    one = subject()
    tokenizer = one.task.tokenizer
    tokenizer.pad_token = tokenizer.eos_token
    end = tokenizer.eos_token_id
    assert list(end_never_learnt(one)) == []
    rows = [replace(r, labels=tuple(IGNORED if i == end else n for i, n in zip(r.input_ids, r.labels))) for r in one.task.data.train]
    (finding,) = end_never_learnt(with_data(one, train=rows))
    assert finding.severity == Severity.ERROR
    assert "padding token is the same" in str(finding.cause)


@pytest.mark.parametrize("pairs", [False, True])
def test_a_template_that_closes_turns_with_another_token(subject, workshop, tmp_path, pairs):
    tokenizer = AutoTokenizer.from_pretrained(workshop.base)
    tokenizer.eos_token = tokenizer.pad_token  # <|endoftext|>, while turns end with <|im_end|>
    tokenizer.save_pretrained(tmp_path / "other")
    settings = json.loads((workshop.base / "config.json").read_text()) | {"eos_token_id": tokenizer.eos_token_id}
    data = {}
    if pairs:
        (tmp_path / "p.jsonl").write_text('{"prompt": "one plus two?", "completion": "three"}\n' * 12)
        data = {"train": str(tmp_path / "p.jsonl"), "eval_split": 0.0}
    model = {"init": "random", "name": None, "config": settings, "tokenizer": str(tmp_path / "other")}
    (finding,) = end_never_learnt(subject(model=model, data=data))
    assert finding.severity == Severity.WARNING
    assert "'<|im_end|>', at which generation does not stop" in str(finding.cause)


def test_answers_that_are_all_cut(subject):
    shortest = min(len(row.input_ids) for row in subject().task.data.train)
    (finding,) = end_never_learnt(subject("cut", data={"max_length": shortest - 2}))  # the end of turn and the line end behind it
    assert f"cut at data.max_length {shortest - 2}" in str(finding.cause)
