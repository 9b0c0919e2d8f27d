"""`isotype plan` on the real small model and the built-in data: what it says is what a run would do."""

import json

import pytest

from isotype.config.load import load
from isotype.tasks.choose import plan

SETTINGS = ["data.limit=40", "data.max_length=64", "train.steps=5", "train.warmup=2", "model.device=cpu", "adapter.r=4"]


@pytest.fixture
def stories(shared):
    folder = shared / "data" / "stories260k"
    if not folder.is_dir():
        pytest.skip("no stories260k beside the checkout")
    return str(folder)


def test_a_plan_shows_what_a_run_would_do(stories, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = plan(load(None, SETTINGS, {"model.name": stories, "data.train": "stdlib"}, preset="fp32"))
    content = json.loads(json.dumps(made.as_json()))
    assert content["precision"]["preset"] == "fp32"
    assert content["precision"]["roles"]["base"]["reason"] == "preset fp32"
    assert 0 < content["parameters"]["trainable"] < content["parameters"]["total"]
    assert content["schedule"]["steps"] == 5
    assert content["schedule"]["warmup"] == 2
    assert content["data"]["train_rows"] > 0
    assert content["memory"]["frozen"] == 4 * (content["parameters"]["total"] - content["parameters"]["trainable"])
    assert content["memory"]["peak_with_process"] > content["memory"]["peak"] > content["memory"]["activations"] > 0
    text = made.as_text()
    for word in ("precision   fp32", "5 steps of 4 rows", "activations of 4 x 64", "frozen weights"):
        assert word in text
    assert text.count("preset fp32") == 1, "a reason that all roles share is said once"
    assert list(tmp_path.iterdir()) == [], "a plan leaves nothing behind"


def test_a_plan_over_the_device_memory_gives_advice(stories, monkeypatch):
    from dataclasses import replace

    from isotype.environment.hardware import detect
    from isotype.training import plan as module

    monkeypatch.setattr(module, "detect", lambda device: replace(detect("cpu"), memory=64 << 20))
    made = plan(load(None, SETTINGS, {"model.name": stories, "data.train": "stdlib"}, preset="fp32"))
    assert made.fits is False
    assert "will not fit into 64.0 MiB" in made.as_text()
