"""`images.train`, `images.eval` and `images.regularisation` as sources: names, or mappings with settings of their own. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from .schema import ImagesSection
from .sources import entries_of, unknown_key

COLUMNS = ("image", "text", "mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureSource:
    """One entry of images.train, images.eval or images.regularisation, as a user gave it.

    caption  of every picture, instead of those in text files
    repeats  how often each picture comes in an epoch
    weight   of the loss of its pictures; of regularisation pictures only
    """

    name: str
    key: str
    caption: str | None = None
    repeats: int = 1
    weight: float = 1.0
    columns: Mapping[str, str] | None = None


_KEYS = {
    "train": ("name", "caption", "columns", "repeats"),
    "eval": ("name", "caption", "columns"),
    "regularisation": ("name", "caption", "columns", "repeats", "weight"),
}


def picture_sources(images: ImagesSection, side: str) -> list[PictureSource]:
    """The sources of one side, with what the section sets for all of them.

    side    `train`, `eval` or `regularisation`
    Raises  UsageError naming the entry and the key
    """
    given, key = getattr(images, side), f"images.{side}"
    if given is None:
        return []
    found = [_source(settings, where, side, images) for where, settings in entries_of(given, key, wanted="folder or file")]
    seen = set()
    for one in found:
        if one.name in seen:
            hint = "" if side == "eval" else "; repeats makes its pictures come more often"
            raise UsageError(f"{key}: {one.name} is named twice{hint}")
        seen.add(one.name)
    return found


def _source(settings: dict[str, Any], where: str, side: str, images: ImagesSection) -> PictureSource:
    settings = {key: value for key, value in settings.items() if value is not None}
    keys = _KEYS[side]
    for key in settings:
        if key in keys:
            continue
        if key == "weight":
            raise UsageError(f"{where}.weight: only images.regularisation has it: the pictures of images.{side} count in full")
        if key == "repeats":
            raise UsageError(f"{where}.repeats: has no effect: evaluation takes every picture once")
        raise unknown_key(where, key, keys)
    name, repeats, weight = settings.get("name"), settings.get("repeats", 1), settings.get("weight", 1.0)
    if not isinstance(name, str) or not name.strip():
        raise UsageError(f"{where}.name: expected a folder or a file, got {name!r}")
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise UsageError(f"{where}.repeats: expected a whole number of at least 1, got {repeats!r}")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
        raise UsageError(f"{where}.weight: expected a number above 0, got {weight!r}")
    caption = settings.get("caption")
    if caption is not None and not isinstance(caption, str):
        raise UsageError(f"{where}.caption: expected text, got {caption!r}")
    columns = settings.get("columns", images.columns)
    if columns is not None:
        if not (isinstance(columns, dict) and all(isinstance(value, str) for value in columns.values())):
            raise UsageError(f"{where}.columns: expected a mapping of our keys to the data's (text: prompt), got {columns!r}")
        if unknown := next((key for key in columns if key not in COLUMNS), None):
            raise UsageError(f"{where}.columns: unknown key {unknown!r}: expected {', '.join(COLUMNS)}")
    return PictureSource(name=name, key=where, caption=caption, repeats=repeats, weight=float(weight), columns=columns)
