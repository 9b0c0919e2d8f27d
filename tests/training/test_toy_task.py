"""The loop runs a task that it has never heard of: trains, reports, resumes after a kill, all with the same code."""

import pytest
from tests.results import metrics, read
from tests.training.toy_task import ToyTask

from isotype.report import write_report
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
    rows = metrics(tmp_path / "run")
    steps = [row for row in rows if "loss" in row]
    assert steps[-1]["points"] == 40 * 4
    assert steps[-1]["learnt"] == 4
    assert not any(word in row for row in rows for word in ("tokens", "supervised"))
    evaluations = [row for row in rows if row.get("event") == "evaluation"]
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"]
    assert evaluations[-1]["eval_points"] == 8
    assert evaluations[-1]["eval_loss_last"] == 0.0
    assert (read(tmp_path / "run", "result")["status"], read(tmp_path / "run", "result")["points"]) == ("done", 160)
    assert read(tmp_path / "run", "precision")["violations"] == []
    assert read(tmp_path / "run", "plan")["task"] == "toy"
    assert "sin(1.0)" in write_report(tmp_path / "run").page.read_text()
