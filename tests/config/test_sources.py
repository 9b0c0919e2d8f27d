"""Sources as a user names them."""

import pytest

from isotype.config.sources import (
    closest_model_hint,
    missing_folder_hint,
    model_folder_problem,
    short_source_names,
)


def test_sources_are_named_for_a_line():
    assert short_source_names(None) == ""
    assert short_source_names("hf:org/set") == "set"
    assert (
        short_source_names(["data/", {"name": "b/c.csv", "weight": 2}, {"weight": 1}])
        == "data, c.csv, ?"
    )


def test_a_mistyped_model_suggests_the_existing_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, marked in (("models/base", True), ("llama-tiny", True), ("llama-tony", False)):
        (tmp_path / name).mkdir(parents=True)
        if marked:
            (tmp_path / name / "config.json").write_text("{}")
    assert (
        closest_model_hint("llama-tinny")
        == closest_model_hint("./llama-tiny-")
        == ", did you mean llama-tiny?"
    )
    assert closest_model_hint("models/bse") == ", did you mean models/base?"
    assert [
        closest_model_hint(name)
        for name in ("org/name", "else", "a/b\0/c", "~nobody-here/x", "/nowhere/base")
    ] == [""] * 5


def test_a_relative_folder_is_told_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project/models/base").mkdir(parents=True)
    assert missing_folder_hint("models/base", tmp_path / "project/run.yaml").endswith(
        f"not at the file; it is {tmp_path}/project/models/base"
    )
    assert (
        missing_folder_hint("models/base")
        == f"; it was looked for as {tmp_path}/models/base: relative names begin in the working directory"
    )
    assert missing_folder_hint(str(tmp_path / "gone")) == ""


def test_a_run_where_a_model_or_an_adapter_is_expected_names_what_to_write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("lora/resolved.yaml", "full/resolved.yaml", "begun/resolved.yaml"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    for name in ("lora/adapter/adapter_config.json", "full/model/config.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text('{"base_model_name_or_path": "org/base"}')
    further = (
        "write model.name: org/base and adapter.start_from: lora/adapter to train it further, or"
        " make it a model: isotype merge lora"
    )
    merge = "make it a model: isotype merge {} --out MODEL, and write distil.teacher: MODEL"
    for key, name, advice in (
        ("model.name", "lora", f"is the folder of a run; {further}"),
        ("model.name", "lora/adapter", f"expected a model; {further}/adapter"),
        ("model.tokenizer", "lora", "write model.tokenizer: lora/adapter"),
        ("adapter.start_from", "lora", "write adapter.start_from: lora/adapter"),
        ("distil.teacher", "lora", merge.format("lora")),
        ("distil.teacher", "lora/adapter", merge.format("lora/adapter")),
        ("model.name", "full", "write model.name: full/model"),
        ("distil.teacher", "full", "write distil.teacher: full/model"),
        ("adapter.start_from", "full", "it trained a whole model; write model.name: full/model"),
        ("model.name", "begun", "it has no result yet; isotype train --resume begun continues it"),
    ):
        assert str(model_folder_problem(key, name)).endswith(advice), (key, name)
    for key, name in (("model.name", "full/model"), ("adapter.start_from", "lora/adapter")):
        assert model_folder_problem(key, name) is None


@pytest.mark.parametrize("key", ["model.name", "distil.teacher", "adapter.start_from"])
def test_a_data_file_where_a_folder_is_expected_is_refused(tmp_path, key):
    file = tmp_path / "chats.jsonl"
    file.touch()
    assert "is a file of data, expected the folder of a" in str(
        model_folder_problem(key, str(file))
    )
