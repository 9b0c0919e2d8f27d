"""Trackers get what metrics.jsonl gets, and cost a run nothing: not its numbers, and not its life."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.api import train as settings

from isotype.errors import UsageError
from isotype.tasks.choose import train


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows(folder) if "loss" in row}


def curves_and_texts(
    folder: Path,
) -> tuple[dict[str, list[tuple[int, float]]], dict[str, list[str]]]:
    """What TensorBoard reads from its event files."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = events.EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    tags = accumulator.Tags()
    curves = {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in tags["scalars"]}
    return curves, {
        tag: [e.tensor_proto.string_val[0].decode() for e in accumulator.Tensors(tag)]
        for tag in tags["tensors"]
    }


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_NAME", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))


def test_tensorboard_has_the_metrics_and_the_numbers_are_those_of_a_run_without_it(
    configured, tmp_path
) -> None:
    pytest.importorskip("tensorboard")
    adapter = {"dropout": 0.2}  # the run draws random numbers at every step
    sections = {"adapter": adapter, "train": {"steps": 2}}
    assert train(configured("plain", **sections)) == 0
    assert train(configured("watched", **sections, run={"trackers": ["tensorboard"]})) == 0
    watched = tmp_path / "watched"
    assert losses(watched) == losses(tmp_path / "plain")
    found, said = curves_and_texts(watched)
    assert dict(found["train/loss"]) == pytest.approx(losses(watched))
    assert [step for step, _ in found["eval/loss"]] == [0, 2]
    assert {
        "train/grad_norm",
        "train/learning_rate",
        "train/tokens_per_second",
        "eval/tokens",
    } <= set(found)
    assert "How much is 1 plus 1?" in said["samples/0/text_summary"][0]
    assert "| train.steps | 2 |" in said["settings/text_summary"][0]


@pytest.mark.full
def test_wandb_works_without_a_network_or_a_key(configured, tmp_path, offline, capsys) -> None:
    pytest.importorskip("wandb")
    assert train(configured(run={"trackers": ["wandb"]})) == 0
    run = tmp_path / "run"
    assert "offline, wandb sync" in capsys.readouterr().out
    assert [file.stat().st_size > 0 for file in run.glob("wandb/offline-run-*/*.wandb")] == [True]
    assert (run / "wandb_id").read_text().strip()


def test_a_missing_package_is_reported_before_loading(configured, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    with pytest.raises(
        UsageError, match=r"run.trackers: wandb is not installed: pip install -e '.*\[wandb\]'"
    ):
        settings.refuse_incomplete(configured(run={"trackers": ["wandb", "tensorboard"]}))
    assert not (tmp_path / "run").exists()
