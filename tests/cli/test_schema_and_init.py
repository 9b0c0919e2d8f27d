"""`isotype init --schema` and `isotype init` as a user types them."""

from __future__ import annotations

import json

import pytest

from isotype.config.load import load
from isotype.errors import UsageError
from tests.commands import ask


def test_the_schema_forbids_unknown_keys_and_describes_every_key():
    schema = json.loads(ask("init", "--schema"))
    assert schema["$schema"].startswith("https://json-schema.org/")
    for section in schema["$defs"].values():
        assert section["additionalProperties"] is False
        assert all(key.get("description") for key in section["properties"].values())


def test_init_does_not_overwrite_a_file(tmp_path):
    file = tmp_path / "run.yaml"
    assert str(file) in ask("init", str(file), "--preset", "qlora", "--model", "m", "--data", "d.jsonl")
    before = file.read_text()
    assert load(file).config.precision.preset == "nf4-lora"
    with pytest.raises(UsageError, match="exists already"):
        ask("init", str(file))
    assert file.read_text() == before
    ask("init", str(file), "--force", "--preset", "full")
    assert load(file).config.adapter.kind == "none"


def test_init_prints_the_file_that_it_writes_as_json(tmp_path):
    answer = json.loads(ask("init", str(tmp_path / "a.yaml"), "--json"))
    assert (tmp_path / "a.yaml").read_text() == answer["text"]
    assert ask("init", "-") == answer["text"]
