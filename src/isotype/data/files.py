"""Finds the files that a name in `data.train` means: one file, those of a folder, or those that a
pattern matches.

The files of runs are left out. Files of another split of the data, and folders that `datasets`
saved, are recognised by their names.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import takewhile
from pathlib import Path

from ..config.sources import SPLITS as SPLITS_FILE
from ..config.sources import SourceSpec
from ..errors import UsageError
from ..runs.folder import LOCK, RESOLVED
from ..wording import pluralise
from .read import CODE_ENDINGS, DATA_ENDINGS, ENDINGS, ending, existing_file, text_lines

TRAINED = {"train", "training"}
_SPLITS = TRAINED | {
    "test",
    "testing",
    "val",
    "valid",
    "validation",
    "dev",
    "eval",
    "evaluation",
    "holdout",
    "held_out",
}
_SPLIT = re.compile(
    rf"(?<![^\W\d_])(?:{'|'.join(sorted(_SPLITS, key=len, reverse=True))})(?![^\W\d_])"
)
_STATE = "state.json"
_INFO = "dataset_info.json"
_BESIDE_DATA = frozenset((_STATE, _INFO, "dataset_infos.json", SPLITS_FILE))
_FIRST = ("preflight.json", "env.json")  # what a run writes before resolved.yaml
_PIECE = 1 << 16  # characters of a plain text handed on at once, cut at line ends
_BEGINNING = 1 << 18  # bytes from which the number of rows is estimated


@dataclass
class File:
    """One file of a source, and what its rows are."""

    path: Path
    name: str

    @property
    def is_text(self) -> bool:
        return ending(self.path) not in DATA_ENDINGS

    @cached_property
    def size(self) -> int:
        return self.path.stat().st_size

    @property
    def about_rows(self) -> int:
        """By the length of its first lines; of Parquet as the file says; 0 where a line is no row."""
        kind = ending(self.path)
        if kind == ".parquet":
            import pyarrow.parquet

            return int(pyarrow.parquet.read_metadata(self.path).num_rows)
        if kind == ".json" or self.is_text or self.path.suffix == ".gz":
            return 0
        with self.path.open("rb") as file:
            start = file.read(_BEGINNING)
        if start:
            return self.size * start.count(b"\n") // len(start)
        return 0

    @property
    def is_blank(self) -> bool:
        """Whether it is without a byte, or a text without a character but white space."""
        return self.size == 0 or (
            self.is_text and all(line.isspace() for _, line in text_lines(self.path, self.name))
        )

    def pieces(self) -> Iterator[str]:
        """A plain text in pieces, together every character of the file."""
        held = ""
        seen = False
        for _, line in text_lines(self.path, self.name):
            held += line
            seen = seen or not line.isspace()
            if len(held) >= _PIECE:
                yield held
                held = ""
        if not seen:
            raise UsageError(f"{self.name}: the file holds only white space")
        if held:
            yield held


def files_of(spec: SourceSpec) -> tuple[list[File], list[str]]:
    """The files that a name means, in their order, and notes on what is not read. Raises UsageError
    where there are none.
    """
    name, path = spec.name, Path(spec.name).expanduser()
    named = ending(path)
    endings = (
        (*ENDINGS, named) if named in CODE_ENDINGS or (named and spec.format == "text") else ENDINGS
    )
    is_pattern = any(mark in name for mark in "*?[") and not os.path.exists(path)
    if is_pattern:
        there = [Path(found) for found in sorted(glob.glob(str(path), recursive=True))]
        below = Path(*takewhile(lambda part: not any(mark in part for mark in "*?["), path.parts))
    elif os.path.isdir(path):
        endings = ENDINGS
        there = sorted(
            p
            for p in path.rglob("*")
            if not any(part.startswith(".") for part in p.relative_to(path).parts)
        )
        below = path
    else:
        if named:
            otherwise = "data.format: text, if it is to be learnt as plain text"
        else:
            otherwise = None
        return [File(existing_file(name, endings, otherwise=otherwise), name)], []
    there, runs = without_runs(there, below)
    for link in there:
        if link.is_symlink() and ending(link) in ENDINGS and not link.exists():
            raise UsageError(
                f"{link}: a link to {link.readlink()}, which does not exist",
                fix="restore that file, or remove the link",
            )
    # each once
    matched = list({p.resolve(): p for p in reversed(there) if p.is_file()}.values())[::-1]
    known = [p for p in matched if ending(p) in endings and p.name not in _BESIDE_DATA]
    if not matched and is_pattern:
        raise UsageError(f"{name}: the pattern matches no file")
    if not known and is_pattern:
        fix = "data.format: text, if it is to be learnt as plain text" if named else None
        raise UsageError(
            f"{name}: none of the {len(matched)} files it matches ends in {', '.join(ENDINGS)}",
            fix=fix,
        )
    if not known:
        fix = (
            "name the files by a pattern, as 'src/**/*.py', if they are to be learnt as plain text"
        )
        raise UsageError(
            f"{name}: a folder without a file that ends in {', '.join(ENDINGS)}", fix=fix
        )
    if not is_pattern:  # a README beside the data is no data
        known = [p for p in known if ending(p) in DATA_ENDINGS] or known
    if runs:
        notes = [f"{name}: the files of runs are not read ({some(runs, below)})"]
    else:
        notes = []
    if left_out := set(matched) - set(known):
        are = "is" if len(left_out) == 1 else "are"
        notes.append(
            f"{name}: {len(left_out)} of {pluralise(len(matched), 'file')} {are} not read"
            f" ({some(left_out, below)})"
        )
    notes += _note_splits(name, known, below)
    return [
        File(existing_file(str(p), endings, empty=len(known) > 1), str(p)) for p in known
    ], notes


def some(paths: Iterable[Path], below: Path) -> str:
    """Up to three of the paths, as they are below a folder."""
    names = sorted(str(p.relative_to(below)) if p.is_relative_to(below) else str(p) for p in paths)
    return ", ".join(names[:3] + ["..."] * (len(names) > 3))


def _note_splits(name: str, paths: Sequence[Path], below: Path) -> list[str]:
    """What to say of files that are named as another split than train, beside files that are named
    as train. A file's own name says its split, or else the nearest of its folders' names within
    `below`, where the search began.
    """
    splits = {}
    for path in paths:
        inner = path.relative_to(below) if path.is_relative_to(below) else path
        found = (_SPLIT.search(part.casefold().replace("-", "_")) for part in reversed(inner.parts))
        splits[inner] = next((match[0] for match in found if match), None)
    others = [path for path, split in splits.items() if split is not None and split not in TRAINED]
    if not others or TRAINED.isdisjoint(splits.values()):
        return []
    are = pluralise(
        len(others),
        "file is named as another split than train and is",
        "files are named as other splits than train and are",
    )
    these = some(others, Path())
    return [
        f"{name}: {are} read like the others ({these}): to hold the rows out, give data.train and"
        " data.eval the files of each"
    ]


def is_saved(name: str | Path) -> bool:
    """Whether `Dataset.save_to_disk` wrote a folder. A `state.json` alone may be a user's own."""
    folder = Path(name).expanduser()
    return os.path.isfile(folder / SPLITS_FILE) or all(
        os.path.isfile(folder / name) for name in (_STATE, _INFO)
    )


def without_runs(paths: Iterable[Path], below: Path) -> tuple[list[Path], list[Path]]:
    """The paths that belong to no run, in their order, and the folders of the runs that the others
    belong to.

    below  where the search began: data that were asked for inside a run are read
    """

    @cache
    def is_run(folder: Path) -> bool:
        begun = (folder / LOCK).is_file() and any((folder / name).is_file() for name in _FIRST)
        return begun or (folder / RESOLVED).is_file()

    kept = []
    runs = set()
    for path in paths:
        inside = [
            parent
            for parent in path.parents
            if parent != below and parent.is_relative_to(below) and is_run(parent)
        ]
        if inside:
            runs.add(inside[-1])
        else:
            kept.append(path)
    return kept, sorted(runs)
