"""The loop runs a task that it has never heard of: trains, reports, resumes after a kill, all with the same code."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch
from tests.training.test_run import same_result
from tests.training.toy_task import ToyTask
from tests.warm import interpreter
from torch import nn

from isotype.report import write_report
from isotype.training.plan import plan
from isotype.training.run import train

_DIES_AT_STEP_4 = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from isotype.config.load import load
from isotype.training.run import train
from tests.training.toy_task import ToyTask

class Dies(ToyTask):
    calls = 0
    def collate(self, rows):
        Dies.calls += 1
        if Dies.calls == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().collate(rows)

loaded = load(sys.argv[1], [], {})
train(loaded, Dies(loaded.config))
"""


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


@pytest.mark.full
def test_a_killed_toy_task_resumes_bit_identical(toy, tmp_path):
    loaded, task = toy("whole")
    assert train(loaded, task) == 0
    loaded, task = toy("killed")
    root = __file__.rpartition("/tests/")[0]
    died = subprocess.run([interpreter(), "-c", _DIES_AT_STEP_4, tmp_path / "killed.yaml", root], capture_output=True, check=False)
    assert died.returncode == -9, died.stderr
    assert train(loaded, task, resume=tmp_path / "killed") == 0
    same_result(tmp_path / "whole", tmp_path / "killed")


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
