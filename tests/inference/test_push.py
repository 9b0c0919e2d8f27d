"""`run.push_to_hub`, against a hub on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants
from peft import PeftModel
from tests.api import check_push, start
from tests.api import inference_push as pushing
from tests.hub import Hub
from transformers import AutoModelForCausalLM

from isotype.errors import UsageError


def test_a_run_pushes_its_adapter_with_a_card(
    standing: Hub, configured, tmp_path: Path, workshop, capsys
) -> None:
    assert start(configured("run", run={"push_to_hub": "sums"}, train={"steps": 2})).status == 0
    assert f"pushed    adapter to {standing.url}/me/sums, private" in capsys.readouterr().out
    assert standing.private == {"me/sums": True}
    there = tmp_path / "hub/models/me/sums"
    card = (there / "README.md").read_text()
    assert f"* base: `{workshop.base}`" in card
    assert "rows" in card.split("* data: ")[1].splitlines()[0]
    assert "| compute | fp32 | fp32 |" in card
    assert not (there / "DONE").exists()
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(workshop.base), str(there))
    # the same run may go on and push again; another run is refused
    again = configured("run", run={"push_to_hub": "sums"}, train={"steps": 4})
    assert check_push(again.config, tmp_path / "run") == "me/sums"
    with pytest.raises(UsageError, match="me/sums exists, and is not this run's"):
        start(configured("other", run={"push_to_hub": "me/sums"}))
    assert not (tmp_path / "other").exists()


@pytest.mark.full
def test_a_merged_model_says_what_its_rounding_cost(
    standing: Hub, configured, tmp_path: Path
) -> None:
    run = {"push_to_hub": "org/sums", "push_merged": True, "push_private": False}
    assert (
        start(
            configured("run", run=run, train={"steps": 2}, precision={"preset": "bf16-lora"})
        ).status
        == 0
    )
    assert standing.private == {"org/sums": False}
    there = tmp_path / "hub/models/org/sums"
    card = (there / "README.md").read_text()
    noise = json.loads((there / "merge.json").read_text())["merge_noise"]
    assert (
        f"* merged in fp32, then rounded to bf16: the rounding is {noise:.1%} of the adapter's effect on the weights"
        in card
    )
    assert "| base | bf16 | bf16 |" in card
    assert "peft" not in card.lower()
    AutoModelForCausalLM.from_pretrained(there, dtype="auto")
    assert not list((tmp_path / "run").glob(".push-*"))


def test_a_failed_upload_does_not_fail_the_run(
    standing: Hub, configured, tmp_path: Path, capsys
) -> None:
    standing.full = True
    assert start(configured("run", run={"push_to_hub": "sums"}, train={"steps": 2})).status == 0
    said = capsys.readouterr().out
    assert "warning   not pushed to me/sums: " in said
    assert f"hf upload me/sums {tmp_path / 'run/adapter'} . --private" in said
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "done"


def test_what_prevents_a_push_is_found_before_the_run(
    standing: Hub, configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(match: str, adapter: str = "lora", **run: object) -> None:
        with pytest.raises(UsageError, match=match):
            start(configured("run", run=run, adapter={"kind": adapter}))
        assert not (tmp_path / "run").exists()

    refused("run.push_merged: true has no effect without run.push_to_hub", push_merged=True)
    refused(
        "run.push_merged: there is no adapter to merge",
        "none",
        push_to_hub="sums",
        push_merged=True,
    )
    refused("run.push_to_hub: a/b/c: ", push_to_hub="a/b/c")
    standing.role = "read"
    refused("the token may only read", push_to_hub="sums")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    refused(f"run.push_to_hub: sums: {standing.url} said: ", push_to_hub="sums")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refused("run.push_to_hub: sums: http://127.0.0.1:9 cannot be reached", push_to_hub="sums")
    monkeypatch.delenv("HF_TOKEN")
    refused("no token of the hub is here\\n  fix       hf auth login", push_to_hub="sums")
    assert not any(asked.startswith("POST") for asked in standing.asked)
    assert pushing.HUB_FILE not in {path.name for path in tmp_path.rglob("*")}
