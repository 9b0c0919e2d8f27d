"""The quickstart for pictures: what it drew is judged on its pixels."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("diffusers")

from typer.testing import CliRunner

from isotype.cli.app import build_app
from isotype.config.load import load
from isotype.errors import UsageError
from isotype.quickstart_pictures import Size, quickstart_pictures
from tests.long import in_full

TINY = Size(vae_steps=2, full_steps=2, lora_steps=2, batch=2, each=2, draws=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@in_full
@pytest.mark.parametrize("preset", ["fp32", "bf16-mixed"])
def test_nine_of_ten_pictures_are_what_was_asked_for(tmp_path, capsys, preset):
    assert quickstart_pictures(tmp_path / "quickstart", preset=preset, json_output=True) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["share"] >= 0.9, said
    assert said["before"]["a yellow cross"] <= 2, "the base never saw one"


@pytest.mark.slow
def test_a_finished_stage_is_not_repeated(tmp_path, capsys):
    folder = tmp_path / "quickstart"
    assert quickstart_pictures(folder, size=TINY, preset="fp32", json_output=True) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(first["after"]) == {"a red circle", "a green square", "a blue triangle", "a yellow cross"}
    assert (folder / "drawn.png").read_bytes().startswith(b"\x89PNG")
    adapter = (folder / "lora/adapter/adapter_model.safetensors").stat().st_mtime_ns
    assert quickstart_pictures(folder, size=TINY, preset="fp32", json_output=True) == 0
    assert (folder / "lora/adapter/adapter_model.safetensors").stat().st_mtime_ns == adapter
    assert load(folder / "lora.yaml", [], {}).config.images.regularisation == str(folder / "pictures/before")


def test_a_slow_machine_gets_fewer_steps():
    assert Size().shortened(0.0) == Size().shortened(0.05) == Size()
    slow = Size().shortened(0.2)
    assert (slow.full_steps, slow.lora_steps) == (621, 279)
    assert Size().shortened(30.0).full_steps == 200


def test_the_speed_is_measured_on_the_pipelines_own_transformer(tmp_path, monkeypatch):
    from isotype.quickstart_pictures import quickstart as module

    steps = []
    monkeypatch.setattr(module, "timed", lambda step, times: steps.append(step()) or 0.2)
    said = []
    module._prepare(tmp_path / "q", Size(vae_steps=1, batch=2, each=1), "fp32", said.append, shorten=True)
    assert len(steps) == 1
    assert "steps: 621" in (tmp_path / "q/full.yaml").read_text()
    assert "steps: 279" in (tmp_path / "q/lora.yaml").read_text()
    assert any("200 ms a step: both stages are shortened to 31% of their steps" in line for line in said)


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    done = CliRunner().invoke(build_app(), ["quickstart", "--diffusion", "--folder", str(tmp_path)])
    assert isinstance(done.exception, UsageError)
    assert "holds other files" in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
