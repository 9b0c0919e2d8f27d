"""Rows of every format become the same conversations, and what is no training row is refused with its place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from isotype.data.formats import detect, example, ignored_keys
from isotype.data.read import Record
from isotype.errors import UsageError

ASK, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}


def read(row: Any, form: str = "auto", columns: dict[str, str] | None = None) -> Any:
    record = Record("x.jsonl", 3, row)
    name, _ = detect(record, form, columns)
    return example(record, name, needs_answer=True, columns=columns)


def test_sharegpt_is_a_conversation() -> None:
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    assert read({"conversations": turns, "id": 1}).messages == (ASK, ANSWER)
    assert read({"conversations": json.dumps(turns), "system": "be kind"}).messages == (
        {"role": "system", "content": "be kind"},
        ASK,
        ANSWER,
    )
    assert read({"conversations": [ASK, ANSWER]}).messages == (ASK, ANSWER)


def test_a_system_prompt_beside_the_messages_is_their_first_turn() -> None:
    found = read({"system": "be kind", "messages": [ASK, ANSWER]})
    assert found.messages == ({"role": "system", "content": "be kind"}, ASK, ANSWER)
    assert read({"system": None, "messages": [ASK, ANSWER]}).messages == (ASK, ANSWER)


def test_sharegpt_tool_turns_become_calls_and_results() -> None:
    turns = [
        {"from": "human", "value": "2+3?"}, {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
        {"from": "observation", "value": "5"}, {"from": "gpt", "value": "5"},
    ]  # fmt: skip
    found = read({"conversations": turns, "tools": json.dumps([TOOL])})
    assert [m["role"] for m in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]
    assert found.tools == [TOOL]


def test_alpaca_is_a_question_with_its_answer() -> None:
    asked = {"role": "user", "content": "Add.\n\n2 and 3"}
    assert read({"instruction": "Add.", "input": "2 and 3", "output": "5"}).messages == (asked, {"role": "assistant", "content": "5"})
    long = read({"instruction": "hi", "input": None, "output": "yes", "system": "be kind", "history": [["a", "b"]]})
    assert [m["role"] for m in long.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert long.messages[-2:] == (ASK, ANSWER)


def test_arguments_of_a_call_are_an_object_however_they_are_written() -> None:
    calls = [{"type": "function", "id": "1", "function": {"name": "add", "arguments": '{"a": 2}'}}]
    row = {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "5"}, ANSWER]}
    message = read(row).messages[1]
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 2}
    assert message["tool_calls"][0]["id"] == "1"


def test_openais_older_names_of_calls_results_and_tools_are_read() -> None:
    call = {"name": "add", "arguments": '{"a": 2}'}
    result = {"role": "function", "name": "add", "content": "5"}
    found = read(
        {"functions": [TOOL["function"]], "messages": [ASK, {"role": "assistant", "content": None, "function_call": call}, result, ANSWER]}
    )
    assert found.tools == [TOOL]
    assert found.messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]
    assert "function_call" not in found.messages[1]
    assert found.messages[2] == {**result, "role": "tool"}


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert read({"messages": [{"role": "user", "content": parts}, ANSWER]}).messages == (ASK, ANSWER)


def test_of_a_pair_of_messages_only_the_completion_is_learnt() -> None:
    found = read({"prompt": [ASK, ANSWER, ASK], "completion": [ANSWER]})
    assert (found.messages, found.learn_from) == ((ASK, ANSWER, ASK, ANSWER), 3)


def test_columns_rename_and_hide() -> None:
    found = read({"question": "a", "answer": "b", "prompt": "not this"}, columns={"prompt": "question", "completion": "answer"})
    assert (found.prompt, found.completion) == ("a", "b")
    row = {"chosen": [ASK, ANSWER], "rejected": []}
    assert read(row, columns={"messages": "chosen"}).messages == (ASK, ANSWER)
    assert ignored_keys(row, "messages", {"messages": "chosen"}) == ["rejected"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "x.jsonl:3: the row has chosen and rejected: preference pairs"),
        ({"messages": [ASK, ANSWER], "chosen": 1, "rejected": 2}, "x.jsonl:3: the row has chosen and rejected"),
        ({"prompt": "a", "completion": "b", "label": False}, "x.jsonl:3: the row has a label that is true or false"),
        ({"question": "a", "answer": "b"}, "x.jsonl:3: the row has question and answer; if these are question and answer: data.c"),
        ({"conversations": [{"from": "narrator", "value": "a"}]}, "x.jsonl:3: conversations[0].from: unknown role 'narrator'"),
        ({"conversations": [{"from": "gpt", "vaule": "a"}]}, "x.jsonl:3: conversations[0] has no value, but 'vaule'"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "x.jsonl:3: conversations has no assistant turn"),
        ({"conversations": "text"}, "x.jsonl:3: conversations must be a list"),
        ({"instruction": "a", "output": ""}, "x.jsonl:3: output is empty: the row has no target"),
        ({"instruction": "", "output": "b"}, "x.jsonl:3: instruction and input are both empty"),
        ({"instruction": "a", "input": 3, "output": "b"}, "x.jsonl:3: input must be text, got a number"),
        ({"instruction": "a", "output": "b", "history": ["c"]}, "x.jsonl:3: history must be a list of [question, answer]"),
        ({"prompt": [ASK], "completion": "b"}, "x.jsonl:3: prompt and completion must both be text, or both lists"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "x.jsonl:3: messages[0].content[0] must"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}]}, "x.jsonl:3: messages[0].tool_calls[0]"),
        ({"messages": [{"role": "assistant", "content": None, "refusal": "No."}]}, "x.jsonl:3: messages[0] has a refusal and no content"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}, "x.jsonl:3: messages[0]: tool_calls belong to an assistant"),
        ({"messages": '[{"role": "user", "content": "a", "content": "b"}]'}, "x.jsonl:3: messages: the key 'content' is given twice"),
        ({"messages": [ASK, ANSWER], "tools": '[{"type": "a", "type": "b"}]'}, "x.jsonl:3: tools: the key 'type' is given twice"),
        ({"messages": [ASK, ANSWER], "tools": "add"}, "x.jsonl:3: tools must be a list of objects, got text"),
        ({"messages": [ASK, ANSWER], "tools": ["{}", "add"]}, "x.jsonl:3: tools[1] must be an object, got text"),
        ({"prompt": "a", "completion": ["b", "c"]}, "x.jsonl:3: completion is a list of 2 texts, and a run learns one answer a row: write"),
        ({"prompt": "a", "completion": [{"text": "b"}]}, "x.jsonl:3: completion is a list of 1 object with a text, and a run learns one"),
        ({"instruction": "a", "output": ["b"]}, "x.jsonl:3: output is a list of 1 text, and a run learns one answer a row"),
        ({"prompt": "a", "completions": ["b", "c"]}, "x.jsonl:3: the row has prompt and completions, a list of 2 texts; if these are"),
        ({"question": "a", "answer": ["b"], "tags": []}, "x.jsonl:3: the row has question and answer, a list of 1 text; if these are"),
        ({"question": "a", "answers": {"text": ["b"]}}, "x.jsonl:3: the row has question and answers, a list of 1 text; if these are"),
        ({"question": "a", "answer": "b", "tags": ["c"]}, "x.jsonl:3: the row has question and answer; if these are question and answer"),
    ],
)  # fmt: skip
def test_what_is_no_row_is_refused_with_its_place(row: Any, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(row)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    "row", [{"prompt": "a", "completion": ["b", "c"]}, {"prompt": "a", "answers": ["b"]}, {"instruction": "a", "output": ["b"]}]
)
def test_a_list_of_texts_may_be_the_steps_of_one_answer(row: Any) -> None:
    """Of these, the one to learn or a row for each would be a part of the answer."""
    with pytest.raises(UsageError, match="or, of parts of one answer, their text joined"):
        read(row)


def test_an_answer_that_is_json_is_text() -> None:
    for answer in ('["Paris", "London"]', '[{"name": "add", "arguments": {}}]', "[1, 2]", '{"a": 1, "a": 2}'):
        found = read({"prompt": "[3, 4]", "completion": answer})
        assert (found.prompt, found.completion, found.messages) == ("[3, 4]", answer, None)
    cells = {"prompt": json.dumps([ASK]), "completion": json.dumps([ANSWER])}
    assert read(cells).messages == (ASK, ANSWER)


def test_tools_are_alike_however_they_are_written() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}, {"type": "function", "function": {"name": "sub"}}]
    for written in (tools, json.dumps(tools), [json.dumps(tool) for tool in tools]):
        assert read({"messages": [ASK, ANSWER], "tools": written}).tools == tools


def test_what_is_said_of_a_row_has_the_names_of_its_file() -> None:
    columns = {"prompt": "inputs", "completion": "targets"}
    record = Record("x.jsonl", 3, {"inputs": "a", "targets": "b"})
    why = detect(record, "auto", columns)[1]
    assert why == "the first row (x.jsonl:3) has the keys inputs (read as prompt) and targets (read as completion)"
    with pytest.raises(UsageError) as caught:
        read({"inputs": "a", "targets": [1]}, columns=columns)
    assert caught.value.message.endswith(
        "prompt is text, completion a list; of this file's keys: inputs (read as prompt), targets (read as completion)"
    )
    with pytest.raises(UsageError) as caught:
        read({"prompt": "a", "targets": 3}, columns={"completion": "targets"})
    assert caught.value.message == "x.jsonl:3: completion must be text, got a number; of this file's keys: targets (read as completion)"


def test_a_missing_column_is_named() -> None:
    with pytest.raises(UsageError, match=r"x\.jsonl:3: no key 'ansewr', but 'answer': data\.columns\.completion: answer"):
        read({"question": "a", "answer": "b"}, columns={"prompt": "question", "completion": "ansewr"})
    with pytest.raises(UsageError, match=r"data\.columns\.promt: unknown key"):
        read({"question": "a"}, columns={"promt": "question"})


def test_keys_of_another_case_are_matched_and_said() -> None:
    record = Record("a.csv", 2, {"Instruction": "Add.", "Input": "1, 2", "Output ": "3", "ID": "7"})
    name, why = detect(record, "auto")
    assert name == "alpaca"
    assert why == (
        "the first row (a.csv:2) has the keys Instruction (read as instruction) and Output  (read as output) and Input (read as input)"
    )
    assert detect(record, "alpaca")[1].startswith("data.format is alpaca; the first row (a.csv:2) has Instruction (read as instruction)")
    (asked, answer) = example(record, name, needs_answer=True).messages or ()
    assert (asked["content"], answer["content"]) == ("Add.\n\n1, 2", "3")
    assert ignored_keys(record.value, name) == ["ID"]
