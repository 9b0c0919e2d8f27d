"""The quickstart for pictures: what it drew is judged by its pixels."""

import json

import pytest

pytest.importorskip("diffusers")

from typer.testing import CliRunner

from isotype.cli.app import build_app
from isotype.errors import UsageError
from isotype.quickstart import quickstart_pictures


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_nine_of_ten_pictures_are_what_was_asked_for(tmp_path, capsys):
    assert quickstart_pictures(tmp_path / "quickstart", json_output=True) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["share"] >= 0.9, said
    assert said["before"]["a yellow cross"] <= 2, "the base never saw one"


@pytest.mark.full
def test_a_finished_stage_is_not_repeated(tmp_path, capsys):
    folder = tmp_path / "quickstart"
    assert quickstart_pictures(folder, share=0.002, vae_steps=2, draws=1, json_output=True) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(first["after"]) == {"a red circle", "a green square", "a blue triangle", "a yellow cross"}
    assert (folder / "drawn.png").read_bytes().startswith(b"\x89PNG")
    adapter = (folder / "lora/adapter/adapter_model.safetensors").stat().st_mtime_ns
    assert quickstart_pictures(folder, share=0.002, draws=1, json_output=True) == 0
    assert (folder / "lora/adapter/adapter_model.safetensors").stat().st_mtime_ns == adapter


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    done = CliRunner().invoke(build_app(), ["quickstart", "--diffusion", "--folder", str(tmp_path)])
    assert isinstance(done.exception, UsageError)
    assert "holds other files" in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
