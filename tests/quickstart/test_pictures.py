"""The quickstart for pictures: what it drew is judged by its pixels."""

import json
import random
from itertools import product

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("diffusers")

from isotype.cli.app import build_app
from isotype.errors import UsageError
from isotype.quickstart import quickstart_pictures
from tests.api import COLOURS, SHAPES, SIDE, classify_picture, draw, draw_at_random, write_pictures


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
    assert (
        quickstart_pictures(folder, step_share=0.002, vae_steps=2, draws=1, json_output=True) == 0
    )
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(first["after"]) == {
        "a red circle",
        "a green square",
        "a blue triangle",
        "a yellow cross",
    }
    assert (folder / "drawn.png").read_bytes().startswith(b"\x89PNG")
    adapter = (folder / "lora/adapter/adapter_model.safetensors").stat().st_mtime_ns
    assert quickstart_pictures(folder, step_share=0.002, draws=1, json_output=True) == 0
    assert (folder / "lora/adapter/adapter_model.safetensors").stat().st_mtime_ns == adapter


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    done = CliRunner().invoke(build_app(), ["quickstart", "--diffusion", "--folder", str(tmp_path)])
    assert isinstance(done.exception, UsageError)
    assert "holds other files" in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


# --- The judge of drawn pictures is right about drawn shapes, and says when there is none.


def test_it_names_every_shape_and_colour():
    chance = random.Random(0)
    for shape, colour in [*product(SHAPES, COLOURS)] * 10:
        assert (
            classify_picture(np.array(draw_at_random(shape, colour, chance)))
            == f"a {colour} {shape}"
        )


def test_other_pictures_are_no_shape():
    white = np.full((SIDE, SIDE, 3), 255, dtype=np.uint8)
    stripes = white.copy()
    stripes[:, ::4] = (215, 40, 40)
    moon = np.minimum(
        np.array(draw("circle", "red")).astype(int)
        + 255
        - np.array(draw("circle", "red", (20, 16), 9)),
        255,
    )
    for other in (
        white,
        stripes,
        np.random.default_rng(0).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8),
        moon.astype(np.uint8),
    ):
        assert classify_picture(other) == "no shape"


def test_pictures_are_written_with_captions_and_by_seed(tmp_path):
    assert write_pictures(tmp_path / "a", SHAPES[:2], count_each=2, seed=1) == 16
    assert (tmp_path / "a/red_circle_0.txt").read_text() == "a red circle\n"
    write_pictures(tmp_path / "b", SHAPES[:2], count_each=2, seed=1)
    write_pictures(tmp_path / "c", SHAPES[:2], count_each=2, seed=2)
    first, same, other = ((tmp_path / name / "blue_square_1.png").read_bytes() for name in "abc")
    assert first == same != other
