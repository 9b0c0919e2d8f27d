"""`isotype init --schema` and `isotype init` as a user types them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from isotype.cli.app import build_app
from isotype.config.load import load
from isotype.errors import UsageError


def invoke(*arguments: str):
    result = CliRunner().invoke(build_app(), list(arguments))
    if isinstance(result.exception, UsageError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_the_schema_forbids_unknown_keys_and_describes_every_key():
    schema = json.loads(invoke("init", "--schema"))
    assert schema["$schema"].startswith("https://json-schema.org/")
    for section in schema["$defs"].values():
        assert section["additionalProperties"] is False
        assert all(key.get("description") for key in section["properties"].values())


def test_init_does_not_overwrite_a_file(tmp_path):
    file = tmp_path / "run.yaml"
    assert str(file) in invoke("init", str(file), "--preset", "qlora", "--model", "m", "--data", "d.jsonl")
    before = file.read_text()
    assert load(file).config.precision.preset == "nf4-lora"
    with pytest.raises(UsageError, match="exists already"):
        invoke("init", str(file))
    assert file.read_text() == before
    invoke("init", str(file), "--force", "--preset", "full")
    assert load(file).config.adapter.kind == "none"


def test_init_prints_the_file_that_it_writes_as_json(tmp_path):
    answer = json.loads(invoke("init", str(tmp_path / "a.yaml"), "--json"))
    assert (tmp_path / "a.yaml").read_text() == answer["text"]
    assert invoke("init", "-") == answer["text"]


def test_init_into_a_missing_folder(tmp_path):
    with pytest.raises(UsageError, match="No such file or directory"):
        invoke("init", str(tmp_path / "no" / "run.yaml"))
