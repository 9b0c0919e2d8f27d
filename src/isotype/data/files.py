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

from ..config.sources import SPLITS_FILE as SPLITS_FILE
from ..config.sources import SourceSpec
from ..errors import UsageError
from ..runs.folder import LOCK, RESOLVED
from ..wording import pluralise
from .read import CODE_ENDINGS, DATA_ENDINGS, ENDINGS, file_suffix, require_file, text_lines

TRAIN_SPLITS = {"train", "training"}
_SPLIT_NAMES = TRAIN_SPLITS | {
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
_SPLIT_PATTERN = re.compile(
    rf"(?<![^\W\d_])(?:{'|'.join(sorted(_SPLIT_NAMES, key=len, reverse=True))})(?![^\W\d_])"
)
_STATE_FILE = "state.json"
_INFO_FILE = "dataset_info.json"
_METADATA_FILES = frozenset((_STATE_FILE, _INFO_FILE, "dataset_infos.json", SPLITS_FILE))
_FIRST_RUN_FILES = ("preflight.json", "env.json")  # what a run writes before resolved.yaml
_PIECE_CHARACTERS = 1 << 16  # characters of a plain text handed on at once, cut at line ends
_SAMPLE_BYTES = 1 << 18  # bytes from which the number of rows is estimated


@dataclass
class File:
    """One file of a source, and what its rows are."""

    path: Path
    name: str

    @property
    def is_text(self) -> bool:
        return file_suffix(self.path) not in DATA_ENDINGS

    @cached_property
    def size(self) -> int:
        return self.path.stat().st_size

    @property
    def estimated_rows(self) -> int:
        """By the length of its first lines; of Parquet as the file says; 0 where a line is no row."""
        kind = file_suffix(self.path)
        if kind == ".parquet":
            import pyarrow.parquet

            return int(pyarrow.parquet.read_metadata(self.path).num_rows)
        if kind == ".json" or self.is_text or self.path.suffix == ".gz":
            return 0
        with self.path.open("rb") as file:
            start = file.read(_SAMPLE_BYTES)
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
        piece = ""
        has_text = False
        for _, line in text_lines(self.path, self.name):
            piece += line
            has_text = has_text or not line.isspace()
            if len(piece) >= _PIECE_CHARACTERS:
                yield piece
                piece = ""
        if not has_text:
            raise UsageError(f"{self.name}: the file holds only white space")
        if piece:
            yield piece


def find_files(spec: SourceSpec) -> tuple[list[File], list[str]]:
    """The files that a name means, in their order, and notes on what is not read. Raises UsageError
    where there are none.
    """
    name, path = spec.name, Path(spec.name).expanduser()
    suffix = file_suffix(path)
    endings = (
        (*ENDINGS, suffix)
        if suffix in CODE_ENDINGS or (suffix and spec.format == "text")
        else ENDINGS
    )
    is_pattern = any(mark in name for mark in "*?[") and not os.path.exists(path)
    if is_pattern:
        paths = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        root = Path(*takewhile(lambda part: not any(mark in part for mark in "*?["), path.parts))
    elif os.path.isdir(path):
        endings = ENDINGS
        paths = sorted(
            p
            for p in path.rglob("*")
            if not any(part.startswith(".") for part in p.relative_to(path).parts)
        )
        root = path
    else:
        if suffix:
            otherwise = "data.format: text, if it is to be learnt as plain text"
        else:
            otherwise = None
        return [File(require_file(name, endings, other_fix=otherwise), name)], []
    paths, runs = exclude_runs(paths, root)
    for link in paths:
        if link.is_symlink() and file_suffix(link) in ENDINGS and not link.exists():
            raise UsageError(
                f"{link}: a link to {link.readlink()}, which does not exist",
                fix="restore that file, or remove the link",
            )
    # each once
    matched = list({p.resolve(): p for p in reversed(paths) if p.is_file()}.values())[::-1]
    data_paths = [p for p in matched if file_suffix(p) in endings and p.name not in _METADATA_FILES]
    if not matched and is_pattern:
        raise UsageError(f"{name}: the pattern matches no file")
    if not data_paths and is_pattern:
        fix = "data.format: text, if it is to be learnt as plain text" if suffix else None
        raise UsageError(
            f"{name}: none of the {len(matched)} files it matches ends in {', '.join(ENDINGS)}",
            fix=fix,
        )
    if not data_paths:
        fix = (
            "name the files by a pattern, as 'src/**/*.py', if they are to be learnt as plain text"
        )
        raise UsageError(
            f"{name}: a folder without a file that ends in {', '.join(ENDINGS)}", fix=fix
        )
    if not is_pattern:  # a README beside the data is no data
        data_paths = [p for p in data_paths if file_suffix(p) in DATA_ENDINGS] or data_paths
    if runs:
        notes = [f"{name}: the files of runs are not read ({summarise_paths(runs, root)})"]
    else:
        notes = []
    if left_out := set(matched) - set(data_paths):
        are = "is" if len(left_out) == 1 else "are"
        notes.append(
            f"{name}: {len(left_out)} of {pluralise(len(matched), 'file')} {are} not read"
            f" ({summarise_paths(left_out, root)})"
        )
    notes += _note_splits(name, data_paths, root)
    return [
        File(require_file(str(p), endings, accept_empty=len(data_paths) > 1), str(p))
        for p in data_paths
    ], notes


def summarise_paths(paths: Iterable[Path], root: Path) -> str:
    """Up to three of the paths, as they are below a folder."""
    names = sorted(str(p.relative_to(root)) if p.is_relative_to(root) else str(p) for p in paths)
    return ", ".join(names[:3] + ["..."] * (len(names) > 3))


def _note_splits(name: str, paths: Sequence[Path], root: Path) -> list[str]:
    """What to say of files that are named as another split than train, beside files that are named
    as train. A file's own name says its split, or else the nearest of its folders' names within
    `root`, where the search began.
    """
    splits = {}
    for path in paths:
        inner = path.relative_to(root) if path.is_relative_to(root) else path
        matches = (
            _SPLIT_PATTERN.search(part.casefold().replace("-", "_"))
            for part in reversed(inner.parts)
        )
        splits[inner] = next((match[0] for match in matches if match), None)
    other_paths = [
        path for path, split in splits.items() if split is not None and split not in TRAIN_SPLITS
    ]
    if not other_paths or TRAIN_SPLITS.isdisjoint(splits.values()):
        return []
    subject = pluralise(
        len(other_paths),
        "file is named as another split than train and is",
        "files are named as other splits than train and are",
    )
    summary = summarise_paths(other_paths, Path())
    return [
        f"{name}: {subject} read like the others ({summary}): to hold the rows out, give data.train and"
        " data.eval the files of each"
    ]


def is_saved_dataset(name: str | Path) -> bool:
    """Whether `Dataset.save_to_disk` wrote a folder. A `state.json` alone may be a user's own."""
    folder = Path(name).expanduser()
    return os.path.isfile(folder / SPLITS_FILE) or all(
        os.path.isfile(folder / name) for name in (_STATE_FILE, _INFO_FILE)
    )


def exclude_runs(paths: Iterable[Path], root: Path) -> tuple[list[Path], list[Path]]:
    """The paths that belong to no run, in their order, and the folders of the runs that the others
    belong to.

    root   where the search began: data that were asked for inside a run are read
    """

    @cache
    def is_run(folder: Path) -> bool:
        begun = (folder / LOCK).is_file() and any(
            (folder / name).is_file() for name in _FIRST_RUN_FILES
        )
        return begun or (folder / RESOLVED).is_file()

    data_paths = []
    runs = set()
    for path in paths:
        run_folders = [
            parent
            for parent in path.parents
            if parent != root and parent.is_relative_to(root) and is_run(parent)
        ]
        if run_folders:
            runs.add(run_folders[-1])
        else:
            data_paths.append(path)
    return data_paths, sorted(runs)
