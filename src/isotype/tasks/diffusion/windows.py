"""Chooses the parts of a picture that are trained on: its aspect bucket, and the windows in it."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_STEPS = 16  # a bucket's sides are multiples of a 16th of the resolution, as far as the model's own multiple allows


@dataclass(frozen=True, order=True)
class Size:
    """In pixels."""

    height: int
    width: int

    @property
    def area(self) -> int:
        return self.height * self.width

    def __str__(self) -> str:
        return f"{self.height} x {self.width}"


@dataclass(frozen=True)
class Window:
    """The part of a picture that is scaled to `size`: between 0 (left or top) and 1 (right or bottom) of the room that is left over."""

    size: Size
    left: float = 0.5
    top: float = 0.5


def buckets(resolution: int, *, max_aspect: float, multiple: int) -> list[Size]:
    """The shapes of pictures, the square first: sides are multiples of `multiple`, areas at most `resolution` squared.

    multiple  pixels in a token of the model, in each direction
    """
    step = max(multiple, resolution // _STEPS // multiple * multiple)
    square = Size(resolution, resolution)
    found = {square}
    for width in range(step, int(resolution * math.sqrt(max_aspect)) + 1, step):
        height = int(resolution**2 / width) // step * step
        if height and max(width, height) / min(width, height) <= max_aspect:
            found.add(Size(height, width))
            found.add(Size(width, height))
    return [square, *sorted(found - {square})]


def bucket_of(width: int, height: int, sizes: Sequence[Size]) -> Size:
    """The shape nearest to a picture's, by the logarithm of width over height; of two equally near ones the larger."""
    aspect = math.log(width / height)
    return min(sizes, key=lambda size: (round(abs(math.log(size.width / size.height) - aspect), 9), -size.area))


def windows(size: Size, crop: Literal["center"] | int, *, seed: int, content: str) -> list[Window]:
    """The windows of a picture that are trained on. Those at random depend on the seed and the picture's content only."""
    if crop == "center":
        return [Window(size)]
    digest = hashlib.sha256(f"crop:{seed}:{content}".encode()).digest()
    draw = random.Random(int.from_bytes(digest[:8], "big"))
    return [Window(size, draw.random(), draw.random()) for _ in range(crop)]
