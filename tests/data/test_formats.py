"""Rows of every format become the same conversations, and what is no training row is refused with
its place.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.api import (
    CONVERSATION_KEYS,
    Record,
    RowError,
    check_example,
    detect_format,
    ignored_keys,
)

from isotype.errors import UsageError

ASK, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def read(row: Any, form: str = "auto", columns: dict[str, str | None] | None = None) -> Any:
    record = Record("x.jsonl", 3, row)
    name, _ = detect_format(record, form, columns)
    return check_example(record, name, needs_answer=True, columns=columns)


def from_gpt(*turns: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[i % 2], "value": turn} for i, turn in enumerate(turns)]


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", **more, "function": {"name": "add", "arguments": arguments}}


SYSTEM, RESULT = (
    {"role": "system", "content": "be kind"},
    {"role": "function", "name": "add", "content": "5"},
)
CALL = {"role": "assistant", "content": "", "tool_calls": [called({"a": 2})]}
ROWS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "sharegpt": ({"conversations": from_gpt("hi", "yes"), "id": 1}, (ASK, ANSWER)),
    "sharegpt as JSON": ({"conversations": json.dumps(from_gpt("hi", "yes")), "system": "be kind"}, (SYSTEM, ASK, ANSWER)),
    "messages under its key": ({"conversations": [ASK, ANSWER]}, (ASK, ANSWER)),
    "a system prompt": ({"system": "be kind", "messages": [ASK, ANSWER]}, (SYSTEM, ASK, ANSWER)),
    "text parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}, ANSWER]},
        (ASK, ANSWER),
    ),
    "alpaca": ({"instruction": "hi", "input": None, "output": "yes", "system": "be kind"}, (SYSTEM, ASK, ANSWER)),
    "alpaca's input": ({"instruction": "h", "input": "i", "output": "yes"}, ({"role": "user", "content": "h\n\ni"}, ANSWER)),
    "alpaca's history": ({"instruction": "hi", "output": "yes", "history": [["hi", "yes"]]}, (ASK, ANSWER, ASK, ANSWER)),
    "sharegpt's calls": (
        {"conversations": [
            {"from": "human", "value": "hi"}, {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
            {"from": "observation", "value": "5"}, {"from": "gpt", "value": "yes"},
        ]},
        (ASK, CALL, {"role": "tool", "content": "5"}, ANSWER),
    ),
    "arguments as text": (
        {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [called('{"a": 2}', id="1")]}, ANSWER]},
        (ASK, {**CALL, "tool_calls": [called({"a": 2}, id="1")]}, ANSWER),
    ),
    "OpenAI's older names": (
        {"functions": [TOOL["function"]], "messages": [
            ASK, {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 2}'}}, RESULT, ANSWER]},
        (ASK, CALL, {**RESULT, "role": "tool"}, ANSWER),
    ),
}  # fmt: skip


def test_rows_of_every_format_become_the_same_messages() -> None:
    for name, (row, messages) in ROWS.items():
        found = read(row)
        assert found.messages == messages, name
        assert found.tools == ([TOOL] if "functions" in row else None), name


def test_of_a_pair_of_messages_only_the_completion_is_learnt() -> None:
    found = read({"prompt": [ASK, ANSWER, ASK], "completion": [ANSWER]})
    assert (found.messages, found.learn_from) == ((ASK, ANSWER, ASK, ANSWER), 3)


def test_columns_rename_and_hide() -> None:
    found = read(
        {"question": "a", "answer": "b", "prompt": "not this"},
        columns={"prompt": "question", "completion": "answer"},
    )
    assert (found.prompt, found.completion) == ("a", "b")
    row = {"chosen": [ASK, ANSWER], "rejected": []}
    assert read(row, columns={"messages": "chosen"}).messages == (ASK, ANSWER)
    assert ignored_keys(row, "messages", {"messages": "chosen"}) == ["rejected"]


WRONG: list[tuple[Any, str]] = [
    (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        "the row has chosen and rejected: preference pairs",
    ),
    ({"messages": [ASK, ANSWER], "chosen": 1, "rejected": 2}, "the row has chosen and rejected"),
    (
        {"prompt": "a", "completion": "b", "label": False},
        "label is false: that marks an unwanted answer",
    ),
    (
        {"question": "a", "answer": "b"},
        "the row has question and answer; if these are question and answer: data.c",
    ),
    (
        {"conversations": [{"from": "narrator", "value": "a"}]},
        "conversations[0].from: unknown role 'narrator'",
    ),
    (
        {"conversations": [{"from": "gpt", "vaule": "a"}]},
        "conversations[0] has no value, but 'vaule'",
    ),
    ({"conversations": [{"from": "human", "value": "a"}]}, "conversations has no assistant turn"),
    ({"conversations": "text"}, "conversations must be a list"),
    ({"instruction": "a", "output": ""}, "output is empty: the row has no target"),
    ({"instruction": "", "output": "b"}, "instruction and input are both empty"),
    (
        {"instruction": "a", "output": "b", "history": ["c"]},
        "history must be a list of [question, answer]",
    ),
    (
        {"prompt": [ASK], "completion": "b"},
        "prompt and completion must both be text, or both lists",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "data": "x"}]}]},
        "messages[0].content[0] must",
    ),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}]},
        "messages[0].tool_calls[0]",
    ),
    (
        {"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]},
        "messages[0]: tool_calls belong to an assistant",
    ),
    (
        {"messages": '[{"role": "user", "content": "a", "content": "b"}]'},
        "messages: the key 'content' is given twice",
    ),
    ({"messages": [ASK, ANSWER], "tools": ["{}", "add"]}, "tools[1] must be an object, got text"),
    ({"instruction": "a", "output": ["b", "c"]}, "output must be text, got a list"),
    (
        {"conversation_id": 1, "role": "user", "content": "a"},
        "the row has conversation_id, role, content: one turn of a",
    ),
    ({"role": "user", "text": "a"}, "the row has role, text: one turn of a conversation"),
    (
        {"prompt": {"0": "a", "1": "b"}, "completion": {"0": "c", "1": "d"}},
        "one table, as pandas' to_json() writes it",
    ),
    ({"dialog": [ASK, ANSWER]}, "dialog is a list of turns: data.columns: {messages: dialog}"),
]


def test_what_is_no_row_is_refused_with_its_place() -> None:
    for row, said in WRONG:
        with pytest.raises(UsageError) as caught:
            read(row)
        assert str(caught.value).startswith(f"x.jsonl:3: {said}")


UNWANTED: list[tuple[str, Any]] = [
    ("label", False), ("label", 0), ("label", -1), ("label", "FALSE"), ("label", "0"), ("Label ", "false"), ("label", "rejected"),
    ("kto_tag", False), ("kto_tag", "False"), ("feedback", "down"), ("feedback", "negative"), ("thumbs", "thumbs down"),
    ("thumbs", "thumbs-down"), ("thumbs", -1),
    ("score", 0), ("score", -2.5), ("rejected", True), ("rejected", 1), ("rejected", "yes"), ("thumbs_down", "TRUE"),
]  # fmt: skip
WANTED: list[tuple[str, Any]] = [
    ("label", True), ("label", 1), ("label", "TRUE"), ("label", None), ("label", "negative"), ("label", 3), ("kto_tag", True),
    ("feedback", "up"), ("feedback", "The answer is short."), ("feedback", None), ("score", 4.5), ("rejected", False),
    ("rejected", "another answer"), ("id", 0), ("thumbs", ""),
]  # fmt: skip
ANSWERED: list[tuple[str, dict[str, Any]]] = [
    ("prompt_completion", {"prompt": "a", "completion": "b"}),
    ("messages", {"messages": [ASK, ANSWER]}),
    ("sharegpt", {"conversations": from_gpt("hi", "yes")}),
    ("alpaca", {"instruction": "hi", "output": "yes"}),
]


@pytest.mark.parametrize(("form", "row"), ANSWERED)
def test_an_answer_marked_as_unwanted_is_never_learnt_in_silence(
    form: str, row: dict[str, Any]
) -> None:
    for asked in ("auto", form):
        for key, value in UNWANTED:
            with pytest.raises(UsageError, match="marks an unwanted answer") as caught:
                read({**row, key: value}, asked)
            assert not isinstance(caught.value, RowError)  # no setting leaves it out in silence
            assert "train.objective=kto" in str(caught.value.fix)
            columns = {key: None}  # the fix for a column that says something else
            assert read({**row, key: value}, asked, columns) is not None
            assert key not in ignored_keys({**row, key: value}, form, columns)  # type: ignore[arg-type]
        for key, value in WANTED:
            assert read({**row, key: value}, asked) is not None, (key, value)


def test_a_turn_marked_as_unwanted_is_refused_unless_it_is_not_learnt() -> None:
    for key, value in (("feedback", "down"), ("label", 0), ("rejected", True)):
        with pytest.raises(UsageError, match=f"a turn has {key}"):
            read({"messages": [ASK, {**ANSWER, key: value}]})
        with pytest.raises(UsageError, match=f"a turn has {key}"):
            read({"conversations": [{"from": "gpt", "value": "yes", key: value}]})
        unlearnt = {**ANSWER, key: value, "weight": 0}
        assert read({"messages": [ASK, unlearnt, ASK, ANSWER]}).messages[1] == unlearnt


def test_classes_of_plain_texts_are_no_verdicts() -> None:
    assert read({"text": "a", "label": 0}).text == "a"
    with pytest.raises(UsageError, match="marks an unwanted answer"):
        read({"text": "a", "label": False})


OTHER = {"role": "assistant", "content": "no"}
# rows of every format with a conversation, and what the objective learns from
CONVERSATIONS: list[tuple[str, dict[str, Any], Any]] = [
    *((form, row, None) for form, row in ANSWERED),
    ("prompt_completion", {"prompt": [ASK], "completion": [ANSWER]}, None),
    ("preference", {"prompt": "hi", "chosen": "yes", "rejected": "no"}, "preference"),
    ("preference", {"prompt": [ASK], "chosen": [ANSWER], "rejected": [OTHER]}, "preference"),
    ("preference", {"chosen": [ASK, ANSWER], "rejected": [ASK, OTHER]}, "preference"),
    ("preference", {"prompt": "hi", "responses": ["yes", "no"], "scores": [2, 1]}, "preference"),
    ("labelled", {"prompt": "hi", "completion": "yes", "label": False}, "labelled"),
    ("labelled", {"prompt": [ASK], "completion": [ANSWER], "label": 1}, "labelled"),
]
BESIDE: dict[str, Any] = {
    "system": "be kind",
    "tools": [TOOL],
    "functions": [TOOL["function"]],
    "images": ["a.png"],
    "image": "a.png",
}


def sides(row: dict[str, Any], only: Any) -> list[Any]:
    """The example of a row, or both of a pair."""
    record = Record("x.jsonl", 3, row)
    name, _ = detect_format(record, "auto", objective_format=only)
    found = check_example(record, name, needs_answer=True)
    return [found] if found.rejected is None else [found, found.rejected]


@pytest.mark.parametrize("key", CONVERSATION_KEYS)
@pytest.mark.parametrize(("form", "row", "only"), CONVERSATIONS)
def test_what_stands_beside_a_conversation_is_read_by_every_format(
    form: str, row: dict[str, Any], only: Any, key: str
) -> None:
    whole = {**row, key: BESIDE[key]}
    if only and key in ("images", "image"):
        with pytest.raises(RowError, match=r"pictures in .* are not offered"):
            sides(whole, only)
        return
    assert key not in ignored_keys(whole, form)  # type: ignore[arg-type]
    for found in sides(whole, only):
        if key == "system":
            assert found.messages[0] == SYSTEM
        elif key in ("tools", "functions"):
            assert found.tools == [TOOL]
        else:
            assert found.pictures == ("a.png",)
        answers = found.messages[found.learn_from :]
        assert [turn["role"] for turn in answers if turn["role"] == "assistant"]
        if only:  # the prompt is not learnt
            assert [turn["role"] for turn in answers] == ["assistant"]


@pytest.mark.parametrize(("form", "row", "only"), CONVERSATIONS)
def test_an_empty_cell_beside_a_conversation_changes_nothing(
    form: str, row: dict[str, Any], only: Any
) -> None:
    plain = sides(row, only)
    for key in CONVERSATION_KEYS:
        for empty in (None, "") if key == "system" else (None, "", []):
            assert sides({**row, key: empty}, only) == plain


def test_what_a_turn_says_of_itself_is_kept_by_every_format() -> None:
    marks = {"weight": 0, "reasoning_content": "easy"}
    turn = {**ANSWER, **marks}
    shared = {"from": "gpt", "value": "yes", **marks}
    rows = [
        ({"messages": [ASK, turn, ASK, ANSWER]}, None),
        ({"conversations": [from_gpt("hi")[0], shared]}, None),
        ({"prompt": [ASK, turn, ASK], "completion": [ANSWER]}, None),
        ({"prompt": [ASK, turn, ASK], "chosen": [ANSWER], "rejected": [OTHER]}, "preference"),
        ({"chosen": [ASK, turn, ASK, ANSWER], "rejected": [ASK, turn, ASK, OTHER]}, "preference"),
        ({"prompt": [ASK, turn, ASK], "completion": [ANSWER], "label": True}, "labelled"),
    ]  # fmt: skip
    for row, only in rows:
        for found in sides(row, only):
            assert found.messages[1] == turn


def test_a_system_prompt_that_the_turns_have_already_is_not_added_again() -> None:
    turns = [SYSTEM, ASK, ANSWER]
    assert read({"system": "be kind", "messages": turns}).messages == tuple(turns)
    row = {"system": "be kind", "chosen": turns, "rejected": [SYSTEM, ASK, OTHER]}
    for found in sides(row, "preference"):
        assert [turn["role"] for turn in found.messages] == ["system", "user", "assistant"]


def test_an_answer_that_is_json_is_text() -> None:
    for answer in (
        '["Paris", "London"]',
        '[{"name": "add", "arguments": {}}]',
        "[1, 2]",
        '{"a": 1, "a": 2}',
    ):
        found = read({"prompt": "[3, 4]", "completion": answer})
        assert (found.prompt, found.completion, found.messages) == ("[3, 4]", answer, None)
    cells = {"prompt": json.dumps([ASK]), "completion": json.dumps([ANSWER])}
    assert read(cells).messages == (ASK, ANSWER)


def test_tools_are_alike_however_they_are_written() -> None:
    tools = [
        {"type": "function", "function": {"name": "add"}},
        {"type": "function", "function": {"name": "sub"}},
    ]
    for written in (tools, json.dumps(tools), [json.dumps(tool) for tool in tools]):
        assert read({"messages": [ASK, ANSWER], "tools": written}).tools == tools


def test_a_missing_column_is_named() -> None:
    with pytest.raises(
        UsageError,
        match=r"x\.jsonl:3: no key 'ansewr', but 'answer': data\.columns\.completion: answer",
    ):
        read(
            {"question": "a", "answer": "b"}, columns={"prompt": "question", "completion": "ansewr"}
        )
    with pytest.raises(UsageError, match=r"data\.columns\.promt: unknown key"):
        read({"question": "a"}, columns={"promt": "question"})
