"""Leaves the files of runs out of a folder or a pattern of data: a run may be written beside the data that it learns from."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

from ..runs.folder import LOCK, RESOLVED

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
