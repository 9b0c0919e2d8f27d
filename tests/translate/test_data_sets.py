"""Data sets that LLaMA-Factory and axolotl describe with names of their own: the entry of data.train
that comes of each description reads the rows that it describes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from isotype.config.load import load
from isotype.config.sources import source_specs
from isotype.translate import translate
from tests.api import Record, check_example, detect_format, ignored_keys
from tests.data.test_other_names import turns_of

from .configurations import AXOLOTL, FACTORY

SYSTEM = {"role": "system", "content": "be kind"}
ASK, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
OTHER = {"role": "assistant", "content": "no"}
TOOLS = [{"name": "add", "parameters": {}}]
OPENAI_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
}
SHARED = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
OBJECTIVES = {"dpo": "preference", "rm": "preference", "kto": "labelled"}


def shared(turn: dict[str, str]) -> dict[str, str]:
    return {
        "from": {"user": "human", "assistant": "gpt"}[turn["role"]],
        "value": turn["content"],
    }


def read_row(config_file: Path, row: dict[str, Any], objective: str | None) -> list[Any]:
    """The examples that a run of this configuration makes of a row: one, or two of a pair."""
    (spec,) = source_specs(load(config_file).config.data, "train")
    record = Record("x.json", 1, row)
    name, _ = detect_format(
        record,
        spec.format,  # type: ignore[arg-type]
        spec.columns,
        roles=spec.roles,
        objective_format=objective,  # type: ignore[arg-type]
    )
    example = check_example(record, name, needs_answer=True, columns=spec.columns, roles=spec.roles)
    assert ignored_keys(row, name, spec.columns, spec.roles) == [key for key in row if key == "id"]
    return [example] if example.rejected is None else [example, example.rejected]


# stage, description, row, turns of the example, and of the rejected one
FACTORY_SETS: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[Any, ...]]] = {
    "alpaca": ("sft", {}, {"instruction": "hi", "input": "", "output": "yes"}, (ASK, ANSWER)),
    "alpaca with columns": (
        "sft",
        {"columns": {"prompt": "question", "response": "answer", "system": "system_prompt"}},
        {"system_prompt": "be kind", "question": "hi", "answer": "yes"},
        (SYSTEM, ASK, ANSWER),
    ),
    "alpaca with a query and a history": (
        "sft",
        {"columns": {"prompt": "a", "query": "b", "response": "c", "history": "d"}},
        {"a": "h", "b": "i", "c": "yes", "d": [["hi", "yes"]]},
        (ASK, ANSWER, {"role": "user", "content": "h\n\ni"}, ANSWER),
    ),
    "alpaca whose input is the question": (
        "sft",
        {"columns": {"prompt": "input", "response": "target"}},
        {"id": 1, "input": "hi", "target": "yes"},
        (ASK, ANSWER),
    ),
    "sharegpt": ("sft", {"formatting": "sharegpt"}, {"conversations": SHARED}, (ASK, ANSWER)),
    "sharegpt with system and tools": (
        "sft",
        {
            "formatting": "sharegpt",
            "columns": {"messages": "dialog", "system": "sys", "tools": "functions_json"},
        },
        {"dialog": SHARED, "sys": "be kind", "functions_json": json.dumps(TOOLS)},
        (SYSTEM, ASK, ANSWER),
    ),
    "openai tags": (
        "sft",
        {"formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": OPENAI_TAGS},
        {"messages": [ASK, ANSWER]},
        (ASK, ANSWER),
    ),
    "openai": (
        "sft",
        {"formatting": "openai", "columns": {"messages": "chat"}, "tags": OPENAI_TAGS},
        {"chat": [SYSTEM, ASK, ANSWER]},
        (SYSTEM, ASK, ANSWER),
    ),
    "tags of its own": (
        "sft",
        {
            "formatting": "sharegpt",
            "columns": {"messages": "log"},
            "tags": {
                "role_tag": "who",
                "content_tag": "what",
                "user_tag": "kunde",
                "assistant_tag": "berater",
                "system_tag": "vorgabe",
            },
        },
        {
            "log": [
                {"who": "vorgabe", "what": "be kind"},
                {"who": "kunde", "what": "hi"},
                {"who": "berater", "what": "yes"},
            ]
        },
        (SYSTEM, ASK, ANSWER),
    ),
    "words of its own under from": (
        "sft",
        {
            "formatting": "sharegpt",
            "tags": {
                "role_tag": "from",
                "content_tag": "value",
                "user_tag": "kunde",
                "assistant_tag": "berater",
            },
        },
        {"conversations": [{"from": "kunde", "value": "hi"}, {"from": "berater", "value": "yes"}]},
        (ASK, ANSWER),
    ),
    "kto of turns": (
        "kto",
        {
            "formatting": "sharegpt",
            "columns": {"messages": "messages", "kto_tag": "label"},
            "tags": OPENAI_TAGS,
        },
        {"messages": [ASK, ANSWER], "label": False},
        (ASK, ANSWER),
    ),
    "kto of sharegpt": (
        "kto",
        {"formatting": "sharegpt", "columns": {"messages": "conversations", "kto_tag": "kto_tag"}},
        {"conversations": SHARED, "kto_tag": False},
        (ASK, ANSWER),
    ),
    "kto of alpaca": (
        "kto",
        {
            "columns": {
                "prompt": "instruction",
                "query": "input",
                "response": "output",
                "kto_tag": "good",
            }
        },
        {"instruction": "hi", "input": "", "output": "yes", "good": False},
        (ASK, ANSWER),
    ),
    "pairs of sharegpt": (
        "dpo",
        {
            "formatting": "sharegpt",
            "ranking": True,
            "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
        },
        {
            "conversations": [SHARED[0]],
            "chosen": SHARED[1],
            "rejected": {"from": "gpt", "value": "no"},
        },
        (ASK, ANSWER),
    ),
    "pairs of alpaca": (
        "rm",
        {
            "ranking": True,
            "columns": {"prompt": "q", "query": "more", "chosen": "best", "rejected": "worst"},
        },
        {"q": "hi", "more": "", "best": "yes", "worst": "no"},
        (ASK, ANSWER),
    ),
    "pairs with tags of their own": (
        "dpo",
        {
            "formatting": "sharegpt",
            "ranking": True,
            "columns": {"messages": "log", "chosen": "chosen", "rejected": "rejected"},
            "tags": {
                "role_tag": "who",
                "content_tag": "what",
                "user_tag": "u",
                "assistant_tag": "a",
            },
        },
        {
            "log": [{"who": "u", "what": "hi"}],
            "chosen": {"who": "a", "what": "yes"},
            "rejected": {"who": "a", "what": "no"},
        },
        (ASK, ANSWER),
    ),
}


@pytest.mark.parametrize("name", FACTORY_SETS)
def test_a_description_of_llamafactory_reads_its_rows(name: str, tmp_path: Path) -> None:
    stage, description, row, turns = FACTORY_SETS[name]
    (tmp_path / "data").mkdir()
    registry = {"identity": {"file_name": "rows.json", **description}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(registry))
    (tmp_path / "a.yaml").write_text(FACTORY.replace("stage: sft", f"stage: {stage}"))
    result = translate(tmp_path / "a.yaml")
    (tmp_path / "run.yaml").write_text(result.text)
    examples = read_row(tmp_path / "run.yaml", row, OBJECTIVES.get(stage))
    assert turns_of(examples[0]) == turns
    if stage in ("dpo", "rm"):
        assert turns_of(examples[1]) == (*turns[:-1], OTHER)
    assert examples[0].is_wanted == (stage != "kto")
    if name == "sharegpt with system and tools":
        assert examples[0].tools == TOOLS


def test_plain_text_of_llamafactory_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    registry = {"identity": {"file_name": "c4.json", "columns": {"prompt": "document"}}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(registry))
    (tmp_path / "a.yaml").write_text(FACTORY.replace("stage: sft", "stage: pt"))
    (tmp_path / "run.yaml").write_text(translate(tmp_path / "a.yaml").text)
    (example,) = read_row(tmp_path / "run.yaml", {"document": "a text"}, None)
    assert example.text == "a text"


def test_what_a_description_lacks_or_has_beside_is_told(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    registry = {
        "identity": {"ms_hub_url": "a/b"},
        "film": {"file_name": "f.json", "columns": {"messages": "m", "videos": "v"}},
    }
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(registry))
    text = FACTORY.replace("stage: sft", "stage: kto").replace("identity", "identity,film")
    (tmp_path / "a.yaml").write_text(text)
    outcomes = {one.source_key.name: one for one in translate(tmp_path / "a.yaml").outcomes}
    note = outcomes["dataset"].note
    assert "identity: ms_hub_url is not offered" in note
    assert "film: videos are not offered" in note
    assert "identity has no kto_tag: data.columns: {label: NAME}" in note


# the objective's settings, the entry, a row, and its turns
AXOLOTL_SETS: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[Any, ...]]] = {
    "fields of its own": (
        "",
        {
            "type": {
                "field_instruction": "q",
                "field_input": "more",
                "field_output": "a",
                "field_system": "s",
                "format": "{instruction} {input} ",
            }
        },
        {"q": "hi", "more": "", "a": "yes", "s": "be kind"},
        (SYSTEM, ASK, ANSWER),
    ),
    "messages": ("", {"type": "chat_template"}, {"messages": [ASK, ANSWER]}, (ASK, ANSWER)),
    "sharegpt by properties": (
        "",
        {
            "type": "chat_template",
            "field_messages": "conversations",
            "message_property_mappings": {"role": "from", "content": "value"},
            "roles": {"user": ["human", "user"], "assistant": ["gpt", "assistant"]},
        },
        {"conversations": SHARED},
        (ASK, ANSWER),
    ),
    "sharegpt by older fields": (
        "",
        {
            "type": "chat_template",
            "field_messages": "talk",
            "message_field_role": "from",
            "message_field_content": "value",
        },
        {"talk": SHARED},
        (ASK, ANSWER),
    ),
    "keys and roles of its own": (
        "",
        {
            "type": "chat_template",
            "field_messages": "log",
            "field_system": "vorgabe",
            "message_property_mappings": {"role": "who", "content": "what"},
            "message_field_training": "learn",
            "roles": {"user": ["kunde", "anrufer"], "assistant": ["berater"]},
        },
        {
            "vorgabe": "be kind",
            "log": [{"who": "anrufer", "what": "hi"}, {"who": "berater", "what": "yes"}],
        },
        (SYSTEM, ASK, ANSWER),
    ),
    "questions and answers": (
        "",
        {"type": "alpaca_chat.load_qa"},
        {"question": "hi", "answer": "yes"},
        (ASK, ANSWER),
    ),
    "open orca": (
        "",
        {"type": "alpaca_w_system.load_open_orca"},
        {"system_prompt": "be kind", "question": "hi", "response": "yes"},
        (SYSTEM, ASK, ANSWER),
    ),
    "pairs with fields of their own": (
        "rl: dpo\n",
        {"type": {"field_prompt": "q", "field_chosen": "a", "field_rejected": "b"}},
        {"q": "hi", "a": "yes", "b": "no"},
        (ASK, ANSWER),
    ),
    "pairs by their type": (
        "rl: dpo\n",
        {"type": "chatml.intel"},
        {"system": "be kind", "question": "hi", "chosen": "yes", "rejected": "no"},
        (SYSTEM, ASK, ANSWER),
    ),
    "pairs of turns": (
        "rl: simpo\n",
        {
            "type": "chat_template.default",
            "field_messages": "conversation",
            "field_chosen": "best",
            "field_rejected": "worst",
        },
        {"conversation": [ASK], "best": ANSWER, "worst": OTHER},
        (ASK, ANSWER),
    ),
    "pairs of turns with keys of their own": (
        "rl: dpo\n",
        {
            "type": "chat_template.default",
            "field_messages": "conversations",
            "message_property_mappings": {"role": "from", "content": "value"},
        },
        {"conversations": [SHARED[0]], "chosen": SHARED[1], "rejected": shared(OTHER)},
        (ASK, ANSWER),
    ),
    "labels with fields of their own": (
        "rl: kto\n",
        {"type": {"field_prompt": "q", "field_completion": "a", "field_label": "good"}},
        {"q": "hi", "a": "yes", "good": False},
        (ASK, ANSWER),
    ),
    "labels by their type": (
        "rl: kto\n",
        {"type": "llama3.argilla"},
        {"instruction": "hi", "completion": "yes", "label": False},
        (ASK, ANSWER),
    ),
}


@pytest.mark.parametrize("name", AXOLOTL_SETS)
def test_a_data_set_of_axolotl_reads_its_rows(name: str, tmp_path: Path) -> None:
    method, entry, row, turns = AXOLOTL_SETS[name]
    datasets = yaml.safe_dump({"datasets": [{"path": "rows.json", **entry}]})
    plain = "datasets:\n  - path: teknium/GPT4-LLM-Cleaned\n    type: alpaca\n"
    (tmp_path / "a.yml").write_text(AXOLOTL.replace(plain, datasets) + method)
    result = translate(tmp_path / "a.yml")
    (tmp_path / "run.yaml").write_text(result.text)
    objective = {"": None, "rl: kto\n": "labelled"}.get(method, "preference")
    examples = read_row(tmp_path / "run.yaml", row, objective)
    assert turns_of(examples[0]) == turns
    if objective == "preference":
        assert turns_of(examples[1]) == (*turns[:-1], OTHER)
    assert examples[0].is_wanted == (objective != "labelled")


def test_wordings_of_axolotl_that_the_template_replaces_are_told(tmp_path: Path) -> None:
    kind = {"field_instruction": "q", "field_output": "a", "format": "Q: {instruction} A:"}
    kind["system_prompt"] = "Be kind."
    text = yaml.safe_dump({"datasets": [{"path": "rows.json", "type": kind}]})
    plain = "datasets:\n  - path: teknium/GPT4-LLM-Cleaned\n    type: alpaca\n"
    (tmp_path / "a.yml").write_text(AXOLOTL.replace(plain, text))
    outcomes = {one.source_key.name: one for one in translate(tmp_path / "a.yml").outcomes}
    note = outcomes["datasets"].note
    assert "format: the chat template writes question and answer" in note
    assert "system_prompt: write the system message into the rows" in note
