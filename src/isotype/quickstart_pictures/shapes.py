"""Drawn pictures: one shape of one colour on white, at a random place and size, with a caption that says so."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIDE = 32  # pixels
SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {"red": (215, 40, 40), "green": (40, 165, 60), "blue": (45, 70, 210), "yellow": (240, 200, 30)}
_FINER = 4  # drawn so many times larger, then scaled down: smooth edges


@dataclass(frozen=True)
class Drawn:
    """One picture. `middle` and `radius` in pixels; the radius is half of the side of the shape's box."""

    shape: str
    colour: str
    middle: tuple[float, float] = (SIDE / 2, SIDE / 2)
    radius: float = 10.0

    @property
    def caption(self) -> str:
        return f"a {self.colour} {self.shape}"

    def image(self) -> Any:
        """A PIL image in RGB."""
        from PIL import Image, ImageDraw

        canvas = Image.new("RGB", (SIDE * _FINER, SIDE * _FINER), "white")
        pen, colour = ImageDraw.Draw(canvas), COLOURS[self.colour]
        for polygon in outline(self.shape):
            pen.polygon([tuple((m + self.radius * c) * _FINER for m, c in zip(self.middle, point)) for point in polygon], fill=colour)
        return canvas.resize((SIDE, SIDE), Image.Resampling.BOX)


def outline(shape: str) -> list[list[tuple[float, float]]]:
    """The polygons of a shape that fills the box from -1 to 1, y downwards."""
    if shape == "circle":
        return [[(math.cos(k * math.pi / 32), math.sin(k * math.pi / 32)) for k in range(64)]]
    if shape == "square":
        return [[(-1, -1), (1, -1), (1, 1), (-1, 1)]]
    if shape == "triangle":
        return [[(0, -1), (1, 1), (-1, 1)]]
    arm = 0.3
    return [[(-1, -arm), (1, -arm), (1, arm), (-1, arm)], [(-arm, -1), (arm, -1), (arm, 1), (-arm, 1)]]


def at_random(shape: str, colour: str, draw: random.Random) -> Drawn:
    """The shape at a place and of a size where all of it is seen."""
    radius = draw.uniform(8.5, 11.5)
    room = SIDE / 2 - radius - 1
    x, y = (SIDE / 2 + draw.uniform(-room, room) for _ in range(2))
    return Drawn(shape, colour, (x, y), radius)


def write_pictures(folder: Path, shapes: Iterable[str], *, each: int, seed: int) -> int:
    """`each` pictures of every shape in every colour, with a .txt of the same name; how many there are."""
    draw, count = random.Random(seed), 0
    folder.mkdir(parents=True, exist_ok=True)
    for shape in shapes:
        for colour in COLOURS:
            for k in range(each):
                made = at_random(shape, colour, draw)
                made.image().save(folder / f"{colour}_{shape}_{k}.png")
                (folder / f"{colour}_{shape}_{k}.txt").write_text(made.caption + "\n", encoding="utf-8")
                count += 1
    return count
