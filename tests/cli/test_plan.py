"""`isotype plan` for a GPU that is not here: what `train.memory` and `train.keep_attention` make of it."""

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


@pytest.mark.full
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
        (["train.keep_attention=true"], "train.keep_attention has no effect with train.gradient_checkpointing: auto"),
        (["train.memory=soon"], "train.memory"),
    ],
    ids=str,
)
def test_settings_without_an_effect_are_refused(planned, setting, says):
    result = planned(*setting)
    assert isinstance(result.exception, UsageError)
    assert says in str(result.exception)
