"""Finds the files for a name in `data.train`. The name can be a file, a folder or a pattern.

Files in Isotype's run folders are not used. The names of files and folders show which files belong
to another split, such as a test split, and which folders the library `datasets` has saved.
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

TRAIN_SPLITS = {"train", "training"}  # names of the folders and files with training data
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
# files of the library `datasets` that contain no rows
_METADATA_FILES = frozenset((_STATE_FILE, _INFO_FILE, "dataset_infos.json", SPLITS_FILE))
_FIRST_RUN_FILES = ("preflight.json", "env.json")  # files that a run writes before resolved.yaml
# number of characters of a piece of plain text; pieces end at line ends
_PIECE_CHARACTERS = 1 << 16
# number of first bytes of a file from which the number of rows is estimated
_SAMPLE_BYTES = 1 << 18


@dataclass
class File:
    """One file of a source. `name` is the path of the file in the form that messages show."""

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
        """Returns the number of rows. For a Parquet file, this number is read from the metadata.
        For another file, it is estimated from the length of the first lines. It is 0 for a file in
        which rows are not lines.
        """
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
        """True if the file has 0 bytes, or is a text file with only white space."""
        return self.size == 0 or (
            self.is_text and all(line.isspace() for _, line in text_lines(self.path, self.name))
        )

    def text_pieces(self) -> Iterator[str]:
        """Yields the plain text of the file in pieces. Together the pieces contain every character."""
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
    """Returns the files for a name, in order, and messages about files that are not read. Raises
    UsageError if there is no file.
    """
    name = spec.name
    path = Path(name).expanduser()
    suffix = file_suffix(path)
    endings: tuple[str, ...] = ENDINGS
    if suffix in CODE_ENDINGS or (suffix and spec.format == "text"):
        endings = (*ENDINGS, suffix)
    if _is_pattern(name) and not os.path.exists(path):
        paths = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        root = Path(*takewhile(lambda part: not _is_pattern(part), path.parts))
        paths, runs = exclude_runs(paths, root)
        matched = _existing_files(paths)
        data_paths = _match_endings(name, matched, endings, suffix)
    elif os.path.isdir(path):
        root = path
        paths, runs = exclude_runs(_visible_paths(path), root)
        matched = _existing_files(paths)
        data_paths = _match_folder(name, matched)
    else:
        fix = _AS_TEXT_FIX if suffix else None
        return [File(require_file(name, endings, unknown_ending_fix=fix), name)], []
    notes = _note_left_out(name, set(matched) - set(data_paths), len(matched), runs, root)
    notes += _note_splits(name, data_paths, root)
    accept_empty = len(data_paths) > 1
    files = [
        File(require_file(str(path), endings, accept_empty=accept_empty), str(path))
        for path in data_paths
    ]
    return files, notes


_AS_TEXT_FIX = "data.format: text, if it is to be learnt as plain text"


def _is_pattern(name: str) -> bool:
    return any(mark in name for mark in "*?[")


def _visible_paths(folder: Path) -> list[Path]:
    """Returns all paths below a folder that are not hidden."""
    return sorted(
        path
        for path in folder.rglob("*")
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _existing_files(paths: Sequence[Path]) -> list[Path]:
    """Returns the paths that are files, without duplicates. Raises UsageError for a broken link to
    a data file.
    """
    for path in paths:
        if path.is_symlink() and file_suffix(path) in ENDINGS and not path.exists():
            raise UsageError(
                f"{path}: a link to {path.readlink()}, which does not exist",
                fix="restore that file, or remove the link",
            )
    first_paths = {path.resolve(): path for path in reversed(paths) if path.is_file()}
    return list(first_paths.values())[::-1]


def _has_data_ending(path: Path, endings: Sequence[str]) -> bool:
    return file_suffix(path) in endings and path.name not in _METADATA_FILES


def _match_endings(
    name: str, matched: Sequence[Path], endings: Sequence[str], suffix: str
) -> list[Path]:
    """Returns the files with a known ending that a pattern matches. Raises UsageError if no such
    file exists.
    """
    if not matched:
        raise UsageError(f"{name}: the pattern matches no file")
    data_paths = [path for path in matched if _has_data_ending(path, endings)]
    if not data_paths:
        raise UsageError(
            f"{name}: none of the {len(matched)} files it matches ends in {', '.join(ENDINGS)}",
            fix=_AS_TEXT_FIX if suffix else None,
        )
    return data_paths


def _match_folder(name: str, matched: Sequence[Path]) -> list[Path]:
    """Returns the files of a folder with a known ending. Raises UsageError if the folder contains
    no such file.
    """
    readable = [path for path in matched if _has_data_ending(path, ENDINGS)]
    if not readable:
        raise UsageError(
            f"{name}: a folder without a file that ends in {', '.join(ENDINGS)}",
            fix=(
                "name the files by a pattern, as 'src/**/*.py', if they are to be learnt as plain"
                " text"
            ),
        )
    # beside data files, text files such as a README are not read
    return [path for path in readable if file_suffix(path) in DATA_ENDINGS] or readable


def _note_left_out(
    name: str, left_out: set[Path], file_count: int, runs: Sequence[Path], root: Path
) -> list[str]:
    """Returns messages about files that are not read, because they are in run folders or have other
    endings.
    """
    notes = []
    if runs:
        notes.append(f"{name}: the files of runs are not read ({summarise_paths(runs, root)})")
    if left_out:
        verb = "is" if len(left_out) == 1 else "are"
        notes.append(
            f"{name}: {len(left_out)} of {pluralise(file_count, 'file')} {verb} not read"
            f" ({summarise_paths(left_out, root)})"
        )
    return notes


def summarise_paths(paths: Iterable[Path], root: Path) -> str:
    """Returns a text with at most three of the paths, relative to a folder."""
    names = sorted(
        str(path.relative_to(root)) if path.is_relative_to(root) else str(path) for path in paths
    )
    return ", ".join(names[:3] + ["..."] * (len(names) > 3))


def _note_splits(name: str, paths: Sequence[Path], root: Path) -> list[str]:
    """Returns a message if the names of some files contain `train` and the names of other files
    contain another split, such as `test`. If a file's name contains no split, the name of the
    nearest folder below `root` decides.
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
    """Returns True if `Dataset.save_to_disk` wrote the folder. A `state.json` alone does not prove
    this, because a user may have written it.
    """
    folder = Path(name).expanduser()
    return os.path.isfile(folder / SPLITS_FILE) or all(
        os.path.isfile(folder / name) for name in (_STATE_FILE, _INFO_FILE)
    )


def exclude_runs(paths: Iterable[Path], root: Path) -> tuple[list[Path], list[Path]]:
    """Returns the paths that are not in a run folder, in the same order, and a list of the run
    folders that contain the other paths.

    root   the folder in which the search began. If this folder is itself inside a run folder, its
           files are not left out
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
