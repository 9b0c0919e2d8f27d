"""What the files of a folder are: a split of the data by their names, a saved dataset, or a run, whose files are no data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from ..config.sources import SPLITS as SPLITS_FILE
from ..runs.folder import LOCK, RESOLVED
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


_STATE, _INFO = "state.json", "dataset_info.json"
BESIDE_DATA = frozenset((_STATE, _INFO, "dataset_infos.json", SPLITS_FILE))


def is_saved(name: str | Path) -> bool:
    """Whether `Dataset.save_to_disk` wrote a folder. A `state.json` alone may be a user's own."""
    folder = Path(name).expanduser()
    return (folder / SPLITS_FILE).is_file() or ((folder / _STATE).is_file() and (folder / _INFO).is_file())


_FIRST = ("preflight.json", "env.json")  # what a run writes before resolved.yaml


def without_runs(paths: Iterable[Path], below: Path) -> tuple[list[Path], list[Path]]:
    """The paths that belong to no run, in their order, and the folders of the runs that the others belong to.

    below  where the search began: data that were asked for inside a run are read
    """

    @cache
    def is_run(folder: Path) -> bool:
        begun = (folder / LOCK).is_file() and any((folder / name).is_file() for name in _FIRST)
        return begun or (folder / RESOLVED).is_file()

    kept, runs = [], set()
    for path in paths:
        inside = [parent for parent in path.parents if parent != below and parent.is_relative_to(below) and is_run(parent)]
        if inside:
            runs.add(inside[-1])
        else:
            kept.append(path)
    return kept, sorted(runs)
