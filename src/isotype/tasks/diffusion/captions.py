"""What a run makes of the captions of its training pictures: a trigger word, tags in other orders, tags left out.

Text is encoded once, before training, so that a caption's random forms are drawn then: so many of each, of which one is taken each time the
picture is seen. They depend on the seed and on the caption only.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...config.schema import ImagesSection
from ...errors import UsageError
from .picture_files import Picture

SEPARATOR = ","


def with_trained_captions(pictures: Sequence[Picture], images: ImagesSection, *, seed: int) -> list[Picture]:
    """The pictures with the captions that are learnt. Raises UsageError for tags that no caption separates."""
    wants_tags = images.tag_orders is not None
    if not wants_tags:
        for key, given in (("keep_tags", images.keep_tags), ("tag_dropout", images.tag_dropout)):
            if given:
                raise UsageError(f"images.{key}: has no effect without images.tag_orders", fix="images.tag_orders: 8")
    elif not any(SEPARATOR in caption for picture in pictures for caption in picture.captions):
        raise UsageError(
            "images.tag_orders: no caption has tags: none contains a comma", fix="separate tags by commas, or remove images.tag_orders"
        )
    return [replace(picture, captions=_forms(picture.captions, images, seed=seed)) for picture in pictures]


def _forms(captions: Sequence[str], images: ImagesSection, *, seed: int) -> tuple[str, ...]:
    made = [form for caption in captions for form in ([caption] if images.tag_orders is None else _orders(caption, images, seed=seed))]
    if images.trigger:
        made = [f"{images.trigger}{SEPARATOR} {form}" if form else images.trigger for form in made]
    return tuple(made)


def _orders(caption: str, images: ImagesSection, *, seed: int) -> list[str]:
    """`images.tag_orders` forms of a caption; the same form may come twice, as it would when drawn anew each time."""
    tags = [tag.strip() for tag in caption.split(SEPARATOR) if tag.strip()]
    kept, rest = tags[: images.keep_tags], tags[images.keep_tags :]
    digest = hashlib.sha256(f"tags:{seed}:{caption}".encode()).digest()
    draw = random.Random(int.from_bytes(digest[:8], "big"))
    forms = []
    for _ in range(images.tag_orders or 1):
        some = [tag for tag in rest if draw.random() >= images.tag_dropout]
        draw.shuffle(some)
        forms.append(f"{SEPARATOR} ".join([*kept, *some]))
    return forms


def caption_of_name(path: Path) -> str:
    """`red_circle-2.png`: red circle 2"""
    return " ".join(path.stem.replace("_", " ").replace("-", " ").split())
