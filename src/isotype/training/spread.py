"""Some of many things, the same in every run, at no fixed distance from each other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def spread(things: Sequence[T], most: int) -> list[T]:
    """At most `most` of them, in their order, drawn with a fixed seed.

    Trained tensors repeat from layer to layer, and LoRA's A and B alternate: at a fixed distance all of the sample can be of one kind.
    """
    return [things[i] for i in sorted(random.Random(0).sample(range(len(things)), min(most, len(things))))]
