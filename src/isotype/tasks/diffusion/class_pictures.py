"""Class pictures for prior preservation: what the base model draws for the class's caption, trained on beside the subject's pictures, so
that the class stays what it was (Ruiz et al. 2023, "DreamBooth"). They are drawn once, before training, into a folder that later runs find.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from ...config.sources import PictureSource
from ...data.progress import watched
from ...errors import UsageError
from .picture_files import InFile, Picture, files_of, pictures_among

RECORD = "drawn.json"


@dataclass(frozen=True)
class ToDraw:
    """number  from 1 in its folder; with the run's seed it decides the noise
    size    its side in pixels; None: the run's
    """

    path: Path
    caption: str
    number: int
    size: int | None


def class_pictures(source: PictureSource, *, pairs: bool = False) -> tuple[list[Picture], list[ToDraw]]:
    """The pictures of a source with `draw`, the first of those in its folder and the missing ones; and the missing ones alone.

    pairs   of a model that edits: class pictures have none before the edit
    Raises  UsageError for these, and for a file in the folder's place
    """
    if pairs:
        raise UsageError(
            f"{source.key}.draw: a model that edits draws from a picture, not from a caption alone", fix=f"remove {source.key}.draw"
        )
    folder, caption = Path(source.name).expanduser(), source.caption or ""
    if folder.is_file():
        raise UsageError(f"{source.key}: {source.name}: a file; class pictures are drawn into a folder")
    there = pictures_among(files_of(folder))[: source.draw] if folder.is_dir() else []
    free = ((number, path) for number in count(1) if (path := folder / f"drawn_{number:04}.png") not in there)
    size = max(source.resolution, default=None)
    missing = [ToDraw(path, caption, number, size) for (number, path), _ in zip(free, range((source.draw or 0) - len(there)))]
    paths = sorted([*there, *(one.path for one in missing)])  # the order that the next run finds them in
    return [Picture(InFile(path), (caption,), str(path)) for path in paths], missing


def one_to_one(train: Sequence[Picture], classes: Sequence[Picture]) -> tuple[list[Picture], list[Picture]]:
    """Both with as many rows in an epoch as the one that has more; the pictures of the other come again in turn."""
    most = max(sum(picture.repeats for picture in some) for some in (train, classes))
    return _cycled(train, most), _cycled(classes, most)


def _cycled(pictures: Sequence[Picture], rows: int) -> list[Picture]:
    each = [i for i, picture in enumerate(pictures) for _ in range(picture.repeats)]
    times = Counter(each[k % len(each)] for k in range(rows)) if each else Counter[int]()
    return [replace(picture, repeats=times[i]) for i, picture in enumerate(pictures)]


def refuse_other(sources: Sequence[PictureSource], todo: Sequence[ToDraw], facts: dict[str, Any]) -> None:
    """Raises  UsageError for a folder whose pictures were drawn from another caption or by another model; where some of them are still to
    be drawn, also for one with others of the `facts`"""
    lacking = {one.path.parent for one in todo}
    for source in sources:
        folder = Path(source.name).expanduser()
        if source.draw is None:
            continue
        try:
            before = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        for key, now in {"caption": source.caption, **facts}.items():
            compared = isinstance(before, dict) and key in before and (folder in lacking or key in ("caption", "model"))
            if compared and before[key] != now:
                raise UsageError(
                    f"images.regularisation: {folder}: its class pictures were drawn with {key} {before[key]!r}, not {now!r}",
                    fix=f"another folder; to go on with both: remove {RECORD} there",
                )


def write_missing(todo: Sequence[ToDraw], facts: dict[str, Any], draw: Callable[[Sequence[ToDraw]], Iterator[bytes]]) -> None:
    """Draws the pictures that are not there, a whole file each, so that a run that is stopped meanwhile goes on with the next one.

    facts  what they were drawn with, kept beside them
    draw   gives the PNG of each, in order
    """
    for folder, caption in {one.path.parent: one.caption for one in todo}.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RECORD).write_text(json.dumps({"caption": caption, **facts}, indent=1) + "\n", encoding="utf-8")
    for one, png in zip(watched(todo, "drawing class pictures"), draw(todo)):
        unfinished = one.path.with_suffix(".part")
        unfinished.write_bytes(png)
        os.replace(unfinished, one.path)
