"""Which files of a source are named as a split of the data: `validation.jsonl`, `test/part-0.csv`, `data/train-00000-of-00001.parquet`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ..wording import counted

TRAINED = {"train", "training"}
SPLITS = TRAINED | {"test", "testing", "val", "valid", "validation", "dev", "eval", "evaluation", "holdout", "held_out"}
_WORD = re.compile(rf"(?<![^\W\d_])(?:{'|'.join(sorted(SPLITS, key=len, reverse=True))})(?![^\W\d_])")


def split_of(path: Path) -> str | None:
    """The split that a file's name says, or else the nearest of its folders' names."""
    for part in reversed(path.parts):
        if found := _WORD.search(part.casefold().replace("-", "_")):
            return found[0]
    return None


def note_splits(name: str, paths: Sequence[Path], below: Path) -> list[str]:
    """What to say of files that are named as another split than train, beside files that are named as train.

    below  the folder in which the files were found: what stands above it names no split of them
    """
    inner = {path: path.relative_to(below) if path.is_relative_to(below) else path for path in paths}
    splits = {path: split_of(path) for path in inner.values()}
    if TRAINED.isdisjoint(splits.values()):
        return []
    others = sorted(str(path) for path, split in splits.items() if split is not None and split not in TRAINED)
    if not others:
        return []
    these = ", ".join(others[:3] + ["..."] * (len(others) > 3))
    are = counted(len(others), "file is named as another split than train and is", "files are named as other splits than train and are")
    return [f"{name}: {are} read like the others ({these}): to hold the rows out, give data.train and data.eval the files of each"]
