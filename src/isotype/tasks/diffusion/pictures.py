"""The pictures and captions of `images.train` and `images.eval`: found, paired and checked before anything is computed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...config.schema import ImagesSection
from ...errors import UsageError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
SHOWN = 8  # complaints told at once


@dataclass(frozen=True)
class Picture:
    """One row of the data. `where`: its file, or the line of a JSONL file that names it."""

    path: Path
    caption: str
    where: str


def find_pictures(given: str | list[str], key: str, *, limit: int | None) -> list[Picture]:
    """Every picture of `images.train` or `images.eval`, in the order of the file names or lines.

    key     `images.train` or `images.eval`, for messages
    Raises  UsageError naming each picture without a caption, each caption without a picture, each line that is not a row
    """
    found: list[Picture] = []
    complaints: list[str] = []
    for name in [given] if isinstance(given, str) else given:
        path = Path(name).expanduser()
        if not path.exists():
            raise UsageError(f"{key}: {name}: no such file or folder")
        before = len(found)
        if path.is_dir():
            found += _of_folder(path, complaints)
        elif path.suffix == ".jsonl":
            found += _of_jsonl(path, complaints)
        else:
            raise UsageError(f"{key}: {name}: expected a folder of pictures or a .jsonl file")
        if len(found) == before and not complaints:
            raise UsageError(f"{key}: {name}: no pictures there ({' '.join(SUFFIXES)})")
    if complaints:
        more = [f"and {len(complaints) - SHOWN} more"] if len(complaints) > SHOWN else []
        raise UsageError("\n".join([*(f"{key}: {line}" for line in complaints[:SHOWN]), *more]))
    return found[:limit]


def split(images: ImagesSection, *, seed: int) -> tuple[list[Picture], list[Picture]]:
    """Training and evaluation pictures. Raises UsageError."""
    from ...training.feed import epoch_order

    assert images.train is not None, "a run without pictures is refused before"
    train = find_pictures(images.train, "images.train", limit=images.limit)
    if images.eval is not None:
        return train, find_pictures(images.eval, "images.eval", limit=None)
    held = min(len(train) - 1, round(images.eval_split * len(train)) or (1 if images.eval_split else 0))
    chosen = set(epoch_order(len(train), seed=seed, epoch=0, shuffle=True)[:held])
    return [p for i, p in enumerate(train) if i not in chosen], [p for i, p in enumerate(train) if i in chosen]


def _of_folder(folder: Path, complaints: list[str]) -> Iterator[Picture]:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
    pictures = [p for p in files if p.suffix.lower() in SUFFIXES]
    stems: dict[Path, Path] = {}
    for path in pictures:
        other = stems.setdefault(path.with_suffix(""), path)
        if other is not path:
            complaints.append(f"{path}: {other.name} has the same caption file: rename one")
            continue
        text = path.with_suffix(".txt")
        if not text.is_file():
            complaints.append(f"{path}: no caption: {text.name} is missing")
            continue
        caption = _caption(text.read_bytes())
        if caption is None:
            complaints.append(f"{text}: not text (UTF-8)")
            continue
        yield Picture(path, caption, str(path))
    for path in files:
        if path.suffix == ".txt" and path.with_suffix("") not in stems:
            complaints.append(f"{path}: a caption without a picture")


def _of_jsonl(file: Path, complaints: list[str]) -> Iterator[Picture]:
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        where = f"{file}:{number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            complaints.append(f"{where}: not JSON: {error}")
            continue
        if not isinstance(row, dict) or not isinstance(row.get("image"), str) or not isinstance(row.get("text"), str):
            complaints.append(f'{where}: expected {{"image": FILE, "text": CAPTION}}')
            continue
        path = file.parent / row["image"]
        if not path.is_file():
            complaints.append(f"{where}: {row['image']}: no such picture")
            continue
        yield Picture(path, row["text"].strip(), where)


def _caption(content: bytes) -> str | None:
    try:
        return " ".join(content.decode("utf-8-sig").split())
    except UnicodeDecodeError:
        return None


def captions_of(pictures: Sequence[Picture]) -> list[str]:
    """Each caption once, in order."""
    return list(dict.fromkeys(p.caption for p in pictures))
