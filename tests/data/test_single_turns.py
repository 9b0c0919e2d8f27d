"""The logs of chat services: one turn a row."""

import json
from typing import Any

import pytest

from isotype.config.schema import DataSection
from isotype.data.load import load_data
from isotype.errors import UsageError

NAMES = ("c1", "c2", "c1", "c2")
ROLES = ("user", "user", "assistant", "assistant")


def rows(**keys: str) -> list[dict[str, Any]]:
    """Four turns of two conversations, mixed; `keys` names what stands for conversation, role, number and content."""
    values = {
        "conversation": NAMES,
        "role": ROLES,
        "number": (0, 0, 1, 1),
        "content": ("Hi", "One?", "Hello", "Two"),
        "name": ("A", "A", "B", "B"),
    }
    return [{theirs: values[ours][i] for ours, theirs in keys.items()} for i in range(4)]


REFUSED = {
    "the usual keys": (rows(conversation="conversation_id", role="role", content="content"), "have the same conversation_id"),
    "text for content": (rows(conversation="conversationId", role="role", content="text"), "have the same conversationId"),
    "a sender": (rows(conversation="chat_id", name="sender", content="text"), "sender becomes role"),
    "a number, no role": (rows(conversation="dialog_id", number="turn", content="text"), "of turn; text becomes content, who says it"),
    "no role": (rows(conversation="conversation_id", content="content"), "who says it becomes role"),
    "no conversation": (rows(role="role", content="content"), "the turns of each conversation"),
    "a role, and text": (rows(role="role", content="text"), "data.format: text learns every turn as a text of its own"),
    "ShareGPT's keys": (rows(role="from", content="value"), "from becomes role, value becomes content"),
    "a message in a key": ([{"conversation_id": "c1", "message": {"role": "user", "content": "Hi"}}], "have the same conversation_id"),
}  # fmt: skip


def written(tmp_path, rows):
    file = tmp_path / "log.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def load(file, families, **settings):
    return load_data(DataSection(train=str(file), max_length=64, cache="none", **settings), families.of("llama3"), seed=0)


@pytest.mark.parametrize("case", REFUSED)
def test_a_row_that_is_one_turn_is_refused_with_what_a_row_holds(tmp_path, families, case):
    rows, fix = REFUSED[case]
    with pytest.raises(UsageError) as refused:
        load(written(tmp_path, rows), families)
    said = str(refused.value)
    assert 'a row holds a whole one: {"messages": [{"role": "user", "content": ...}' in said
    assert fix in said
    assert "did you mean" not in said
    assert "\n" not in refused.value.message


def test_turns_are_learnt_as_texts_where_that_is_asked(tmp_path, families):
    turns = written(tmp_path, rows(conversation="conversation_id", role="role", content="text"))
    assert len(load(turns, families, format="text").train) == 4


def test_a_list_of_turns_under_another_key_is_no_single_turn(tmp_path, families):
    chat = {"conversation_id": 1, "content": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    with pytest.raises(UsageError, match="content is a list of turns: write it as messages"):
        load(written(tmp_path, [chat]), families)
