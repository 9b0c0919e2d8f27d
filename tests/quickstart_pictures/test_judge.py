"""The judge of drawn pictures is right about drawn shapes, and says when there is none."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("PIL.Image")

from isotype.quickstart_pictures.judge import judged
from isotype.quickstart_pictures.shapes import COLOURS, SHAPES, SIDE, Drawn, at_random, write_pictures


def pixels(drawn: Drawn) -> np.ndarray:
    return np.array(drawn.image())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("colour", COLOURS)
def test_it_names_every_shape_and_colour(shape, colour):
    draw = random.Random(f"{shape}{colour}")
    for _ in range(10):
        assert str(judged(pixels(at_random(shape, colour, draw)))) == f"a {colour} {shape}"


def test_it_bears_some_noise():
    draw, noise = random.Random(0), np.random.default_rng(0)
    for shape in SHAPES:
        rough = pixels(at_random(shape, "blue", draw)).astype(float) + noise.normal(0, 20, (SIDE, SIDE, 3))
        assert str(judged(rough.clip(0, 255).astype(np.uint8))) == f"a blue {shape}"


def test_what_is_no_shape_is_none():
    white = np.full((SIDE, SIDE, 3), 255, dtype=np.uint8)
    assert judged(white).shape is None
    stripes = white.copy()
    stripes[:, ::4] = (215, 40, 40)
    assert judged(stripes).shape is None
    assert judged(np.random.default_rng(0).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)).shape is None
    moon = np.minimum(pixels(Drawn("circle", "red")).astype(int) + 255 - pixels(Drawn("circle", "red", (20, 16), 9)), 255)
    assert judged(moon.astype(np.uint8)).shape is None


def test_pictures_are_written_with_captions_and_by_seed(tmp_path):
    assert write_pictures(tmp_path / "a", SHAPES[:2], each=2, seed=1) == 16
    assert (tmp_path / "a/red_circle_0.txt").read_text() == "a red circle\n"
    write_pictures(tmp_path / "b", SHAPES[:2], each=2, seed=1)
    write_pictures(tmp_path / "c", SHAPES[:2], each=2, seed=2)
    first, same, other = ((tmp_path / name / "blue_square_1.png").read_bytes() for name in "abc")
    assert first == same != other
