"""The pictures of a folder: captions in text files of the same name, or in a metadata file as `datasets` names it; masks by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from ...data.run_files import without_runs
from .contents import InFile
from .picture import Picture

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
CAPTIONS = (".txt", ".caption")
METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
Complain = Callable[[str, str], None]
"""Takes the place of a bad row and the reason."""


def pictures_beside_captions(folder: Path, complain: Complain) -> Iterator[Picture]:
    """Each picture with the captions of its text file, a caption a line."""
    files = files_of(folder)
    stems: dict[Path, Path] = {}
    for path in pictures_among(files):
        other = stems.setdefault(path.with_suffix(""), path)
        if other is not path:
            complain(str(path), f"{other.name} has the same caption file: rename one")
            continue
        if (captions := _captions_beside(path, complain)) is not None:
            yield Picture(InFile(path), captions, str(path))
    for path in files:
        if path.suffix in CAPTIONS and path.with_suffix("") not in stems:
            complain(str(path), "a caption without a picture")


def _captions_beside(path: Path, complain: Complain) -> tuple[str, ...] | None:
    there = [text for suffix in CAPTIONS if (text := path.with_suffix(suffix)).is_file()]
    if not there:
        complain(str(path), f"no caption: {path.stem}.txt is missing")
        return None
    read = {}
    for text in there:
        captions = captions_in(text)
        if captions is None:
            complain(str(text), "not text (UTF-8)")
            return None
        read[text.name] = captions
    if len(set(read.values())) > 1:
        complain(str(path), f"{' and '.join(read)} disagree: remove one")
        return None
    return next(iter(read.values()))


def captions_in(text: Path) -> tuple[str, ...] | None:
    """The captions of a file, a line each; an empty file holds the empty caption. None where it is no text."""
    try:
        lines = [" ".join(line.split()) for line in text.read_bytes().decode("utf-8-sig").splitlines()]
    except UnicodeDecodeError:
        return None
    return tuple(dict.fromkeys(line for line in lines if line)) or ("",)


def files_of(folder: Path) -> list[Path]:
    """The files of a folder and below, without those of runs: their samples are pictures too."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
    return without_runs(files, folder)[0]


def pictures_among(files: list[Path]) -> list[Path]:
    return [p for p in files if p.suffix.lower() in SUFFIXES]


def metadata_of(folder: Path) -> Path | None:
    """The file that holds the captions of the folder's pictures."""
    return next((folder / name for name in METADATA if (folder / name).is_file()), None)


def masks_in(folder: Path) -> dict[str, Path]:
    """Name without suffix, relative to the folder -> mask."""
    return {p.relative_to(folder).with_suffix("").as_posix(): p for p in pictures_among(files_of(folder))}
