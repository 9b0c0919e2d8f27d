"""Says which shape of which colour a picture shows, from its pixels alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from .shapes import COLOURS, SHAPES, SIDE, Drawn

MOST_APART = 0.3  # share of pixels that differ from the template: above it the picture shows no shape
MOST_OFF = 50  # of 255, the mean difference of the shape's pixels from its colour
_INK = 0.35  # between white (0) and the colour (1)


@dataclass(frozen=True)
class Verdict:
    """What is seen. `apart`: pixels that differ from the nearest template, as a share of both together; 1 where there is no shape."""

    shape: str | None
    colour: str | None
    apart: float

    def is_a(self, colour: str, shape: str) -> bool:
        return (self.colour, self.shape) == (colour, shape)

    def __str__(self) -> str:
        return f"a {self.colour} {self.shape}" if self.shape else "no shape"


def judged(picture_HWC: NDArray[np.uint8]) -> Verdict:
    """The nearest template in place, size and shape; the colour by the mean of the shape's pixels.

    picture_HWC  uint8[SIDE SIDE 3]
    """
    pixels = picture_HWC.astype(np.float64)
    far = np.abs(255.0 - pixels).max(-1)  # from white
    inside = far > 128
    if inside.sum() < 30:
        return Verdict(None, None, 1.0)
    mean = pixels[inside].mean(0)
    colour = min(COLOURS, key=lambda name: float(np.square(mean - COLOURS[name]).sum()))
    if np.abs(pixels[inside] - COLOURS[colour]).mean() > MOST_OFF:
        return Verdict(None, None, 1.0)
    ink = np.clip(far / max(1.0, np.abs(255.0 - np.array(COLOURS[colour])).max()), 0, 1) > _INK
    rows, columns = np.nonzero(ink)
    middle = ((columns.min() + columns.max() + 1) / 2, (rows.min() + rows.max() + 1) / 2)
    radius = max(np.ptp(columns) + 1, np.ptp(rows) + 1) / 2
    found = min(
        (_apart(ink, _template(shape, middle, radius + grown)), shape) for shape in SHAPES for grown in (-1.0, -0.5, 0.0)
    )  # smooth edges make the box of the ink a little larger
    return Verdict(found[1], colour, found[0]) if found[0] <= MOST_APART else Verdict(None, colour, found[0])


def _apart(ink: NDArray[np.bool_], template: NDArray[np.bool_]) -> float:
    """1 - intersection over union."""
    return 1.0 - float((ink & template).sum()) / float((ink | template).sum())


@cache
def _template(shape: str, middle: tuple[float, float], radius: float) -> NDArray[np.bool_]:
    black = np.asarray(Drawn(shape, "red", middle, max(1.0, radius)).image().convert("L"), dtype=np.float64)
    return np.asarray(black.reshape(SIDE, SIDE) < 255 - _INK * (255 - black.min()))
