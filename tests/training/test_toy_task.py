"""The loop runs a task that it has never heard of: trains, reports, resumes after a kill, all with the same code."""

from __future__ import annotations

import json

import pytest
import torch
from tests.training.toy_task import ToyTask
from torch import nn

from isotype.report import write_report
from isotype.training.plan import plan
from isotype.training.run import train


@pytest.fixture
def toy(configured):
    def make(folder: str = "run", **sections):
        loaded = configured(folder, adapter={"kind": "none"}, **sections)
        return loaded, ToyTask(loaded.config)

    return make


def test_a_toy_task_trains_and_reports(toy, tmp_path, capsys):
    loaded, task = toy(train={"steps": 40, "learning_rate": 1e-2, "eval_every": 10})
    assert train(loaded, task) == 0
    said = capsys.readouterr().out
    assert "pt/s" in said
    assert "40 points" in said
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert steps[-1]["points"] == 40 * 4
    assert steps[-1]["learnt"] == 4
    assert not any(word in row for row in rows for word in ("tokens", "supervised"))
    evaluations = [row for row in rows if row.get("event") == "evaluation"]
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"]
    assert evaluations[-1]["eval_points"] == 8
    assert evaluations[-1]["eval_loss_last"] == 0.0
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["status"] == "done"
    assert result["points"] == 160
    precision = json.loads((tmp_path / "run/precision.json").read_text())
    assert precision["violations"] == []
    assert json.loads((tmp_path / "run/plan.json").read_text())["task"] == "toy"
    assert "sin(1.0)" in write_report(tmp_path / "run").page.read_text()


def test_a_toy_task_is_planned(toy):
    loaded, task = toy()
    made = plan(task, loaded.sources)
    assert made.memory.not_simulated is None
    assert made.total == 16 + 16 + 16 + 1
    assert "40 points" in made.as_text()


class Noisy(nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.randn_like(x)


def test_a_model_that_draws_in_evaluation_gives_the_same_loss_after_reload(toy, monkeypatch):
    plain = ToyTask.network
    monkeypatch.setattr(ToyTask, "network", lambda self, *given: nn.Sequential(plain(self, *given), Noisy()))
    loaded, task = toy(train={"steps": 2})
    assert train(loaded, task) == 0
