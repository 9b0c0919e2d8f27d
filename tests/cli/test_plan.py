"""`isotype plan` for a GPU that is not here: its ledger, and what `train.memory` and `train.keep_attention` make of it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from isotype.cli.app import build_app
from isotype.errors import UsageError

SETTINGS = [
    "model.init=random", "model.config={model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 3, "
    "num_attention_heads: 4, num_key_value_heads: 2}", "data.train=stdlib", "data.limit=40", "data.max_length=128", "train.steps=5",
    "adapter.r=4", "precision.preset=bf16-lora", "--device", "h200",
]  # fmt: skip


@pytest.fixture
def planned(shared, tmp_path, monkeypatch):
    folder = shared / "data" / "stories260k"
    if not folder.is_dir():
        pytest.skip("no stories260k beside the checkout")
    monkeypatch.chdir(tmp_path)

    def run(*more):
        return CliRunner().invoke(build_app(), ["plan", *SETTINGS, f"model.tokenizer={folder}", *more])

    return run


def answer(result):
    assert result.exit_code == 0, (result.exception, result.output)
    return json.loads(result.stdout)


def test_the_ledger_as_json_and_as_text(planned):
    kept = ["train.gradient_checkpointing=layers+offload", "train.keep_attention=all", "--ledger"]
    made = answer(planned(*kept, "--json"))
    ledger, choice = made["ledger"], made["checkpointing"]
    assert choice["train.keep_attention"] == "all"
    assert ledger["device"] == made["device"]["name"] == "H200"
    assert ledger["measured"] is False
    assert ledger["ours"]["seconds"] > 0
    assert ledger["ours"]["peak"] == made["memory"]["peak"]
    phases = {row["phase"] for row in ledger["ours"]["rows"]}
    assert phases == {"forward", "recompute", "backward", "update"}
    assert {row["kind"] for row in ledger["ours"]["rows"]} >= {"product", "attention", "attention backward", "memory", "copy"}
    assert all(row["source"] for row in ledger["unsloth"]["rows"])
    assert "query, key and value kept" in ledger["savings"]
    text = planned(*kept).output
    for words in (
        "times are unmeasured",
        "Unsloth 2026.10.9",
        "the step",
        "memory at the peak",
        "saved, each counted",
        "attention's output kept",
    ):
        assert words in text


def test_without_the_option_there_is_no_ledger(planned):
    assert "ledger" not in answer(planned("--json"))


def test_a_target_of_memory_makes_auto_recompute(planned):
    free = answer(planned("--json"))
    assert free["checkpointing"]["train.gradient_checkpointing"] == "none"
    target = 0.9 * free["memory"]["peak"] / 2**20
    less = answer(planned("--json", f"train.memory={target:.2f}MiB"))
    assert less["checkpointing"]["train.gradient_checkpointing"] != "none"
    assert less["memory"]["peak"] < free["memory"]["peak"]
    assert "train.memory" in less["checkpointing"]["reason"]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (["train.memory=1GiB", "train.gradient_checkpointing=none"], "train.memory has no effect with train.gradient_checkpointing: none"),
        (["train.keep_attention=all"], "train.keep_attention has no effect with train.gradient_checkpointing: auto"),
        (
            ["train.keep_attention=all", "train.gradient_checkpointing=layers", "model.optimize=false"],
            "no layer of this model has the form",
        ),
        (["train.memory=soon"], "train.memory"),
    ],
    ids=str,
)
def test_settings_without_an_effect_are_refused(planned, setting, says):
    result = planned(*setting)
    assert isinstance(result.exception, UsageError)
    assert says in str(result.exception)
