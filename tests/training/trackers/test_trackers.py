"""Trackers get what metrics.jsonl gets, and cost a run nothing: not its numbers, and not its life."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isotype.entry import train as settings
from isotype.errors import UsageError
from isotype.tasks.choose import train
from isotype.training.trackers import Trackers


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows(folder) if "loss" in row}


def curves_and_texts(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, list[str]]]:
    """What TensorBoard reads from its event files."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = events.EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    tags = accumulator.Tags()
    curves = {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in tags["scalars"]}
    return curves, {tag: [e.tensor_proto.string_val[0].decode() for e in accumulator.Tensors(tag)] for tag in tags["tensors"]}


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    """What the offline files of wandb hold, which `wandb sync` would send; nothing while the record of the run's end is not there.

    wandb's own process writes the file, and may still be at it when `finish()` has returned.
    """
    from wandb.proto import wandb_internal_pb2

    found, ended = [], False
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in log_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("history"):
                found.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
            ended = ended or record.HasField("exit")
    return found if ended else []


def log_records(content: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log after a file header of 7 bytes: in blocks of 32 KiB; crc32 (4 bytes), length (2), kind (1), data.

    Kinds: 1 whole, 2 first, 3 middle, 4 last part.
    """
    at, parts = 7, b""
    while at + 7 <= len(content):
        room = (1 << 15) - at % (1 << 15)
        if room < 7:
            at += room
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        if kind == 0 or at + 7 + length > len(content):
            break
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_NAME", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))


def test_tensorboard_has_the_metrics_and_the_numbers_are_those_of_a_run_without_it(configured, tmp_path) -> None:
    pytest.importorskip("tensorboard")
    adapter = {"dropout": 0.2}  # the run draws random numbers at every step
    assert train(configured("plain", adapter=adapter)) == 0
    assert train(configured("watched", adapter=adapter, run={"trackers": ["tensorboard"]})) == 0
    watched = tmp_path / "watched"
    assert losses(watched) == losses(tmp_path / "plain")
    found, said = curves_and_texts(watched)
    assert dict(found["train/loss"]) == pytest.approx(losses(watched))
    assert [step for step, _ in found["eval/loss"]] == [0, 2, 4, 6]
    assert {"train/grad_norm", "train/learning_rate", "train/tokens_per_second", "eval/tokens"} <= set(found)
    assert "How much is 1 plus 1?" in said["samples/0/text_summary"][0]
    assert "| train.steps | 6 |" in said["settings/text_summary"][0]


@pytest.mark.full
def test_a_resumed_run_has_one_curve(configured, tmp_path) -> None:
    pytest.importorskip("tensorboard")
    loaded = configured(run={"trackers": ["tensorboard"], "keep": 9}, train={"steps": 4})
    assert train(loaded) == 0
    import shutil

    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_4")  # as if it had been killed after step 2
    from isotype.config.load import load

    again = load(tmp_path / "run" / "resolved.yaml", resolved=True)
    assert train(again, resume=tmp_path / "run") == 0
    assert [step for step, _ in curves_and_texts(tmp_path / "run")[0]["train/loss"]] == [1, 2, 3, 4]


@pytest.mark.full
def test_wandb_works_without_a_network_or_a_key(configured, tmp_path, offline, capsys) -> None:
    pytest.importorskip("wandb")
    assert train(configured(run={"trackers": ["wandb"]})) == 0
    run = tmp_path / "run"
    assert "offline, wandb sync" in capsys.readouterr().out
    until = time.monotonic() + 900
    while not (found := wandb_rows(run)) and time.monotonic() < until:
        time.sleep(0.2)
    assert {row["step"]: row["train/loss"] for row in found if "train/loss" in row} == losses(run)
    assert [row["step"] for row in found if "eval/loss" in row] == [0, 2, 4, 6]
    assert sum("samples" in row or "samples/_type" in row for row in found) == 4
    assert (run / "wandb_id").read_text().strip()


def test_a_missing_package_is_reported_before_loading(configured, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"run.trackers: wandb is not installed: pip install 'isotype\[wandb\]'"):
        settings.refuse_incomplete(configured(run={"trackers": ["wandb", "tensorboard"]}))
    assert not (tmp_path / "run").exists()


def test_a_failing_tracker_is_named_once_and_the_run_continues() -> None:
    class Broken:
        name, place, told = "broken", "", 0

        def scalars(self, step, values):
            self.told += 1
            raise OSError("disk full\nmore")

        def samples(self, step, samples):
            self.told += 1

        def close(self, exit_status):
            self.told += 1

    said: list[str] = []
    broken = Broken()
    trackers = Trackers([broken], said.append)
    trackers.row({"step": 1, "loss": 2.0})
    trackers.row({"step": 2, "loss": 2.0})
    trackers.samples(2, [])
    trackers.close(0)
    assert broken.told == 1
    assert said == ["tracker   broken failed and is switched off: disk full"]
