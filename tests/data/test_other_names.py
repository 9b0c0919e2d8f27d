"""Rows under other names than Isotype's: capitals and blanks, keys and roles of turns, labels and
pairs beside conversations, dialogues in one text, ChatGPT's export.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tests.api import Record, check_example, detect_format, ignored_keys, read_csv

from isotype.config.schema import DataSection
from isotype.data.load import load_data
from isotype.errors import UsageError

SYSTEM = {"role": "system", "content": "be kind"}
ASK, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
OTHER = {"role": "assistant", "content": "no"}


def read(
    row: Any,
    objective: Any = None,
    columns: dict[str, str | None] | None = None,
    roles: dict[str, str] | None = None,
) -> Any:
    record = Record("x.jsonl", 3, row)
    name, _ = detect_format(record, "auto", columns, roles=roles, objective_format=objective)
    return check_example(record, name, needs_answer=True, columns=columns, roles=roles)


def turns_of(example: Any) -> tuple[Any, ...]:
    """The turns of an example, of prompt and completion as text too."""
    if example.messages is not None:
        return example.messages
    return (
        {"role": "user", "content": example.prompt},
        {"role": "assistant", "content": example.completion},
    )


# each format with its keys as they should be
PLAIN: list[tuple[dict[str, Any], Any]] = [
    ({"instruction": "hi", "input": "", "output": "yes"}, None),
    ({"prompt": "hi", "completion": "yes"}, None),
    ({"messages": [ASK, ANSWER]}, None),
    ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}, None),
    ({"prompt": "hi", "chosen": "yes", "rejected": "no"}, "preference"),
    ({"prompt": "hi", "completion": "yes", "label": "true"}, "labelled"),
]
SPELLINGS = (str.upper, str.title, "{} ".format, " {}".format)


@pytest.mark.parametrize(("row", "objective"), PLAIN)
def test_names_in_capitals_or_with_blanks_are_read_and_said(row: Any, objective: Any) -> None:
    expected = read(row, objective)
    for spell in SPELLINGS:
        spelt = {spell(key): value for key, value in row.items()}
        record = Record("x.jsonl", 3, spelt)
        name, reason = detect_format(record, "auto", objective_format=objective)
        assert check_example(record, name, needs_answer=True) == expected
        assert ignored_keys(spelt, name) == []
        for key in row:
            shown = spell(key) if spell(key) == spell(key).strip() else repr(spell(key))
            assert f"{shown} (read as {key})" in reason
        column = next(iter(row))  # and where the setting's own spelling is another one
        assert read(spelt, objective, {column: column.swapcase()}) == expected


def test_a_text_in_another_spelling_beside_a_whole_format_is_read() -> None:
    row = {"instruction": "hi", "Input ": "there", "System": "be kind", "output": "yes"}
    turns = ({"role": "user", "content": "hi\n\nthere"}, ANSWER)
    assert read(row).messages == (SYSTEM, *turns)


def test_rows_that_had_a_format_keep_it() -> None:
    """Names in other spellings never make a second format, nor a row that is refused."""
    for row in (
        {"prompt": "hi", "completion": "yes", "Text": "another", "Images": "x", "Tools": "y"},
        {"messages": [ASK, ANSWER], "Conversations": 3, "History": "none", "Instruction": "x"},
        {"prompt": "hi", "completion": "yes", "Chosen": "x", "Rejected": "z"},
    ):
        assert turns_of(read(row)) == (ASK, ANSWER)
        name, _ = detect_format(Record("x.jsonl", 3, row), "auto")
        others = [key for key in row if key[0].isupper()]
        assert ignored_keys(row, name) == others


def test_two_spellings_of_one_name_are_not_chosen_between() -> None:
    with pytest.raises(UsageError, match=r"no known format|unknown key"):
        read({"PROMPT": "hi", "Prompt ": "ho", "Completion": "yes"})


def in_other_words(turn: dict[str, str]) -> dict[str, str]:
    words = {"user": "customer", "assistant": "agent"}
    return {"speaker": words[turn["role"]], "text": turn["content"]}


TURN_COLUMNS: dict[str, str | None] = {"role": "speaker", "content": "text"}
TURN_ROLES = {"customer": "user", "agent": "assistant"}
WITH_TURNS: list[tuple[dict[str, Any], Any]] = [
    ({"messages": [ASK, ANSWER]}, None),
    ({"conversations": [ASK, ANSWER]}, None),
    ({"prompt": [ASK], "completion": [ANSWER]}, None),
    ({"prompt": [ASK], "chosen": [ANSWER], "rejected": [OTHER]}, "preference"),
    ({"chosen": [ASK, ANSWER], "rejected": [ASK, OTHER]}, "preference"),
    ({"messages": [ASK], "chosen": ANSWER, "rejected": OTHER}, "preference"),
    ({"messages": [ASK, ANSWER], "label": True}, "labelled"),
    ({"prompt": [ASK], "completion": [ANSWER], "label": 1}, "labelled"),
]


@pytest.mark.parametrize(("row", "objective"), WITH_TURNS)
def test_turns_with_other_keys_and_roles_are_read_by_every_format(row: Any, objective: Any) -> None:
    expected = read(row, objective)
    for as_json in (False, True):  # a table's cell
        renamed = {}
        for key, value in row.items():
            if isinstance(value, list):
                value = [in_other_words(turn) for turn in value]
            elif isinstance(value, dict):
                value = in_other_words(value)
            renamed[key] = json.dumps(value) if as_json and isinstance(value, list) else value
        assert read(renamed, objective, TURN_COLUMNS, TURN_ROLES) == expected
        name, _ = detect_format(
            Record("x.jsonl", 3, renamed),
            "auto",
            TURN_COLUMNS,
            roles=TURN_ROLES,
            objective_format=objective,
        )
        assert ignored_keys(renamed, name, TURN_COLUMNS, TURN_ROLES) == []


def test_known_words_need_no_roles_and_calls_are_read() -> None:
    row = {
        "dialog": [
            {"who": "human", "what": "hi", "learn": True},
            {"who": "function_call", "what": '{"name": "add", "arguments": {"a": 2}}'},
            {"who": "observation", "what": "5"},
            {"who": "gpt", "what": "yes", "learn": False},
        ]
    }
    columns: dict[str, str | None] = {"messages": "dialog", "role": "who", "content": "what"}
    found = read(row, columns={**columns, "train": "learn"})
    assert [turn["role"] for turn in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 2}
    assert found.messages[3]["train"] is False


def test_names_of_turns_without_a_turn_are_refused() -> None:
    for columns, roles in ((TURN_COLUMNS, None), (None, TURN_ROLES)):
        with pytest.raises(UsageError, match="no list of turns in the row"):
            read({"prompt": "hi", "completion": "yes"}, None, columns, roles)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"users": "customer"}, "data.train.roles.users: unknown key, did you mean user?"),
        ({"user": "x", "assistant": ["y", "x"]}, "data.train.roles: x is user and assistant"),
    ],
)
def test_wrong_roles_are_refused(
    roles: Any, message: str, tmp_path: Path, families: SimpleNamespace
) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": [ASK, ANSWER]}))
    with pytest.raises(UsageError, match=message):
        load_data(
            DataSection(train=str(tmp_path / "x.jsonl"), roles=roles), families.of("chatml"), seed=0
        )


def load(folder: Path, families: SimpleNamespace, rows: list[Any], objective: Any, **data: Any):
    path = folder / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_data(
        DataSection(train=str(path), eval_split=0, **data),
        families.of("chatml"),
        seed=0,
        objective_format=objective,
    )


FEEDBACK: list[tuple[Any, bool]] = [
    ("up", True), ("down", False), ("👍", True), ("👎", False), ("Thumbs Up", True), ("thumbs-down", False), (1, True),
    (-1, False), ("-1", False), (0.0, False),
    ("good", True), ("bad", False), ("positive", True), ("negative", False), (True, True), ("FALSE", False),
]  # fmt: skip
LOGS: list[dict[str, Any]] = [
    {"messages": [ASK, ANSWER]},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
    {"instruction": "hi", "input": "", "output": "yes"},
    {"prompt": "hi", "completion": "yes"},
    {"messages": [SYSTEM, ASK, OTHER, ASK, ANSWER]},
]


@pytest.mark.parametrize("log", LOGS)
def test_labels_and_feedback_of_a_log_are_read_by_kto(log: Any) -> None:
    for value, is_wanted in FEEDBACK:
        for row, columns in (
            ({**log, "label": value}, None),
            ({**log, "feedback": value}, {"label": "feedback"}),
        ):
            found = read(row, "labelled", columns)
            assert found.is_wanted is is_wanted, value
            turns = turns_of(found)
            assert turns[-1] == ANSWER
            if found.messages is not None:  # the last answer alone is judged
                assert found.learn_from == len(turns) - 1
            name = "labelled"
            assert ignored_keys(row, name, columns) == []  # type: ignore[arg-type]


def test_feedback_on_the_last_turn_is_read_by_kto() -> None:
    row = {"messages": [ASK, {**OTHER, "feedback": "up"}, ASK, {**ANSWER, "feedback": "down"}]}
    found = read(row, "labelled", {"label": "feedback"})
    assert not found.is_wanted
    assert found.learn_from == 3


def test_a_column_of_the_other_sense_is_turned_round() -> None:
    for column, value, is_wanted in (
        ("thumbs_down", True, False),
        ("is_rejected", 0, True),
        ("wrong", "yes", False),
    ):
        row = {"messages": [ASK, ANSWER], column: value}
        assert read(row, "labelled", {"label": column}).is_wanted is is_wanted


def test_answers_without_a_label_are_left_out_and_counted(
    tmp_path: Path, families: SimpleNamespace
) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"question {i}"}, ANSWER], "feedback": word}
        for i, word in enumerate(["up", "down", None, "up", ""])
    ]
    rows += [{"messages": [{"role": "user", "content": "more"}, ANSWER]}]
    for order in (rows, rows[::-1]):
        found = load(tmp_path, families, order, "labelled", columns={"label": "feedback"})
        assert len(found.documents) == 3
        assert [
            note
            for note in found.facts["notes"]
            if "3 training rows dropped: no label says whether the answer is wanted" in note
        ]


def test_a_log_that_ends_with_a_question_has_no_answer_to_judge() -> None:
    with pytest.raises(UsageError, match="messages ends with a turn of user"):
        read({"messages": [ASK, ANSWER, ASK], "label": True}, "labelled")


PAIRS: list[dict[str, Any]] = [
    {"messages": [ASK], "chosen": ANSWER, "rejected": OTHER},
    {"messages": [ASK], "chosen": [ANSWER], "rejected": [OTHER]},
    {"messages": [ASK], "chosen": "yes", "rejected": "no"},
    {
        "conversations": [{"from": "human", "value": "hi"}],
        "chosen": {"from": "gpt", "value": "yes"},
        "rejected": {"from": "gpt", "value": "no"},
    },
    {"instruction": "hi", "input": "", "chosen": "yes", "rejected": "no"},
    {"instruction": "hi", "chosen": [ANSWER], "rejected": [OTHER]},
    {"chosen": "\n\nHuman: hi\n\nAssistant: yes", "rejected": "\n\nHuman: hi\n\nAssistant: no"},
    {"chosen": "User: hi\n\nAssistant: yes", "rejected": "User: hi\n\nAssistant: no"},
    {"prompt": [ASK], "chosen": "yes", "rejected": "no"},
    {
        "chosen": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}],
        "rejected": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "no"}],
    },
]


@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_beside_a_prompt_of_every_format_are_read(pair: Any) -> None:
    for row, before in (({**pair}, ()), ({**pair, "system": "be kind"}, (SYSTEM,))):
        found = read(row, "preference")
        assert turns_of(found) == (*before, ASK, ANSWER)
        assert turns_of(found.rejected) == (*before, ASK, OTHER)
        if found.messages is not None:
            assert found.learn_from == len(before) + 1
        assert ignored_keys(row, "preference") == []


def test_a_dialogue_in_one_text_has_its_common_turns_as_the_prompt() -> None:
    common = "\n\nHuman: hi\n\nAssistant: yes\n\nHuman: Two\n\nparagraphs: why?"
    row = {
        "chosen": f"{common}\n\nAssistant: So.\n\nNote: this.",
        "rejected": f"{common}\n\nAssistant: no",
    }
    found = read(row, "preference")
    assert [turn["role"] for turn in found.messages] == ["user", "assistant", "user", "assistant"]
    assert found.messages[2]["content"] == "Two\n\nparagraphs: why?"
    assert found.messages[3]["content"] == "So.\n\nNote: this."
    assert found.learn_from == 3


def test_an_unused_conversation_beside_a_whole_pair_is_named() -> None:
    row = {"prompt": "hi", "chosen": "yes", "rejected": "no", "messages": [ASK, ANSWER]}
    assert turns_of(read(row, "preference")) == (ASK, ANSWER)
    assert ignored_keys(row, "preference") == ["messages"]
    row = {"chosen": [ASK, ANSWER], "rejected": [ASK, OTHER], "messages": [ASK, ANSWER]}
    assert turns_of(read(row, "preference")) == (ASK, ANSWER)
    assert ignored_keys(row, "preference") == ["messages"]
    for key, value in (("messages", [ASK, ANSWER]), ("instruction", 3)):  # neither is a prompt
        row = {"chosen": [ANSWER], "rejected": [OTHER], key: value}
        assert turns_of(read(row, "preference")) == (ANSWER,)
        assert ignored_keys(row, "preference") == [key]


def test_a_prompt_that_is_neither_text_nor_turns_is_a_bad_row() -> None:
    for answers in (("yes", "no"), ([ANSWER], [OTHER])):
        row = {"prompt": True, "chosen": answers[0], "rejected": answers[1]}
        with pytest.raises(UsageError, match="prompt must be text or a list of messages"):
            read(row, "preference")


# rows with names of their own, and the objective: the error says which data.columns reads them
ADVISED: list[tuple[dict[str, Any], Any]] = [
    ({"question": "hi", "chosen": "yes", "rejected": "no"}, "preference"),
    ({"system_prompt": "be kind", "question": "hi", "chosen": "yes", "rejected": "no"}, "preference"),
    ({"Question": "hi", "chosen_response": "yes", "rejected_response": "no"}, "preference"),
    ({"prompt": "hi", "preferred": "yes", "dispreferred": "no"}, "preference"),
    ({"messages": [ASK, ANSWER], "feedback": "up"}, "labelled"),
    ({"messages": [ASK, {**ANSWER, "thumbs": "up"}]}, "labelled"),
    ({"conversations": [ASK, ANSWER], "kto_tag": True}, "labelled"),
    ({"question": "hi", "answer": "yes", "thumbs": 1}, "labelled"),
    ({"prompt": "hi", "completion": "yes", "Thumbs Up": True}, "labelled"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "objective"), ADVISED)
def test_the_columns_that_an_error_names_read_the_row(row: Any, objective: Any) -> None:
    with pytest.raises(UsageError) as caught:
        read(row, objective)
    text = f"{caught.value.message}\n{caught.value.fix}"
    start = text.index("data.columns: {") + len("data.columns: ")
    columns = yaml.safe_load(text[start : text.index("}", start) + 1])
    found = read(row, objective, columns)
    assert [turn["content"] for turn in turns_of(found)][-2:] == ["hi", "yes"]
    assert ignored_keys(row, objective, columns) == []


def test_sft_names_the_column_for_kto() -> None:
    for row in (
        {"messages": [ASK, ANSWER], "feedback": "down"},
        {"messages": [ASK, {**ANSWER, "feedback": "down"}]},
    ):
        with pytest.raises(UsageError) as caught:
            read(row)
        assert "train.objective=kto" in str(caught.value.fix)
        assert "data.columns: {label: feedback}" in str(caught.value.fix)
        assert not read(row, "labelled", {"label": "feedback"}).is_wanted


def node(name: str, parent: str | None, role: str, *parts: Any, **message: Any) -> dict[str, Any]:
    content = {"content_type": "text", "parts": list(parts)}
    return {
        "id": name,
        "parent": parent,
        "children": [],
        "message": {
            "author": {"role": role},
            "content": content,
            "recipient": "all",
            "metadata": {},
            **message,
        },
    }


def export(*nodes: dict[str, Any], current: str = "e") -> dict[str, Any]:
    mapping = {"root": {"id": "root", "message": None, "parent": None, "children": ["a"]}}
    mapping |= {one["id"]: one for one in nodes}
    return {"title": "A chat", "create_time": 1.5, "mapping": mapping, "current_node": current}


CHAT = export(
    node("a", "root", "system", ""),
    node("b", "a", "user", "hi"),
    node("c", "b", "assistant", "no"),  # another branch
    node("d", "b", "assistant", "search(hi)", recipient="browser"),
    node("t", "d", "tool", "found"),
    node("s", "t", "assistant", "yes"),
    node("e", "s", "assistant", "and more"),
)


def test_an_export_of_chatgpt_is_read_as_messages() -> None:
    record = Record("conversations.json", 1, CHAT)
    name, reason = detect_format(record, "auto")
    assert name == "messages"
    assert "mapping (ChatGPT's export, read as messages)" in reason
    found = check_example(record, name, needs_answer=True)
    assert found.messages == (ASK, {"role": "assistant", "content": "yes\n\nand more"})
    assert ignored_keys(CHAT, name) == ["title", "create_time"]


def test_broken_exports_are_bad_rows() -> None:
    picture = export(node("e", "root", "user", {"asset_pointer": "file://x"}, "What is it?"))
    cycle = export(node("e", "f", "user", "hi"), node("f", "e", "assistant", "yes"))
    for row, message in (
        (picture, "a turn of user has a picture or a file"),
        (cycle, "is its own ancestor"),
        (export(current="gone"), "current_node names no node"),
    ):
        with pytest.raises(UsageError, match=message):
            read(row)


def test_pictures_as_openai_writes_them() -> None:
    for url in ({"url": "a.png", "detail": "low"}, "a.png"):
        parts = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "What?"}]
        found = read({"messages": [{"role": "user", "content": parts}, ANSWER]})
        assert found.pictures == ("a.png",)
        assert [part["type"] for part in found.messages[0]["content"]] == ["image", "text"]


@pytest.mark.parametrize(
    ("first", "delimiter"), [("sep=;", ";"), ('"sep=;"', ";"), ("SEP=|", "|"), ("sep=\t", "\t")]
)
def test_excels_line_with_the_delimiter_is_no_header(
    first: str, delimiter: str, tmp_path: Path
) -> None:
    rows = [["prompt", "completion"], ["a, b; c", "yes"], ["x"], ["d", "e\nf"]]
    cells = [delimiter.join(f'"{cell}"' for cell in row) for row in rows]
    (tmp_path / "x.csv").write_bytes(("\ufeff" + "\r\n".join([first, *cells])).encode())
    records = list(read_csv(tmp_path / "x.csv", "x.csv"))
    assert [record.line for record in records] == [3, 4, 5]
    assert records[0].value == {"prompt": "a, b; c", "completion": "yes"}
    assert records[1].error
    assert "fewer than the header's 2" in records[1].error
