"""The judge of drawn pictures is right about drawn shapes, and says when there is none."""

import random
from itertools import product

import numpy as np
import pytest

pytest.importorskip("PIL.Image")

from isotype.quickstart.shapes import COLOURS, SHAPES, SIDE, draw, draw_at_random, judged, write_pictures


def test_it_names_every_shape_and_colour():
    chance = random.Random(0)
    for shape, colour in [*product(SHAPES, COLOURS)] * 10:
        assert judged(np.array(draw_at_random(shape, colour, chance))) == f"a {colour} {shape}"


def test_other_pictures_are_no_shape():
    white = np.full((SIDE, SIDE, 3), 255, dtype=np.uint8)
    stripes = white.copy()
    stripes[:, ::4] = (215, 40, 40)
    moon = np.minimum(np.array(draw("circle", "red")).astype(int) + 255 - np.array(draw("circle", "red", (20, 16), 9)), 255)
    for other in (white, stripes, np.random.default_rng(0).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8), moon.astype(np.uint8)):
        assert judged(other) == "no shape"


def test_pictures_are_written_with_captions_and_by_seed(tmp_path):
    assert write_pictures(tmp_path / "a", SHAPES[:2], each=2, seed=1) == 16
    assert (tmp_path / "a/red_circle_0.txt").read_text() == "a red circle\n"
    write_pictures(tmp_path / "b", SHAPES[:2], each=2, seed=1)
    write_pictures(tmp_path / "c", SHAPES[:2], each=2, seed=2)
    first, same, other = ((tmp_path / name / "blue_square_1.png").read_bytes() for name in "abc")
    assert first == same != other
