"""Reads the pictures of one source. A source is a folder or a table. For a folder, the captions are
in text files or in a metadata file. A table is a JSONL, CSV or Parquet file.

The bytes of a picture are in a file or in a cell of a Parquet file. They are read when they are
needed, and are not kept in memory.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import repeat
from pathlib import Path
from typing import Any

from ...config.kind import PICTURE_SUFFIXES
from ...data.files import exclude_runs
from ...data.pictures import BadPicture, open_picture, resolve_picture, unreadable_reason
from ...data.read import JSON_ENDINGS, Record, file_suffix, sha256
from ...data.records import read_records
from ...errors import UsageError
from ...wording import list_names, pluralise
from .video_files import VIDEO_SUFFIXES, count_frames, is_video, read_frames, refuse_without_pyav


def fingerprint(files: Iterable[Path]) -> str:
    """Returns a hash of the content of the files. A process reads each file only once, unless its
    size or its modification time changes.
    """
    digest = hashlib.sha256()
    for path in sorted(files):
        stat = path.stat()
        digest.update(f"{path.name}:{_hash_file(path, stat.st_size, stat.st_mtime_ns)}".encode())
    return digest.hexdigest()


@cache
def _hash_file(path: Path, size: int, time: int) -> str:
    return sha256(path)


@dataclass(frozen=True)
class FileContent:
    """A file that contains a picture."""

    path: Path

    @property
    def base(self) -> Path:
        """The path without the file's ending. The caption file has the same base."""
        return self.path.with_suffix("")

    def read(self) -> bytes:
        return self.path.read_bytes()

    def fingerprint(self) -> str:
        return fingerprint([self.path])


@dataclass(frozen=True)
class ParquetContent:
    """A cell of a Parquet file that contains a picture. The cell contains bytes, or a struct with
    the field `bytes`, as the library `datasets` writes it.

    group, row  the number of the row group, and the number of the row within the group, both
                counted from 0
    index       the number of the picture, if the cell is a list of pictures; counted from 0
    """

    path: Path
    column: str
    group: int
    row: int
    index: int | None = None

    def read(self) -> bytes:
        cell = _read_column(self.path, self.column, self.group)[self.row].as_py()
        if self.index is not None:
            cell = cell[self.index]
        data = cell.get("bytes") if isinstance(cell, dict) else cell
        return data if isinstance(data, bytes) else b""

    def fingerprint(self) -> str:
        return hashlib.sha256(self.read()).hexdigest()


@lru_cache(maxsize=1)  # pictures are read in the order of the file
def _read_column(path: Path, column: str, group: int) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path).read_row_group(group, columns=[column]).column(0)
    except pa.ArrowException as error:
        raise OSError(f"broken Parquet: {str(error).splitlines()[0]}") from None


@dataclass(frozen=True)
class FrameFolder:
    """A folder whose pictures are the frames of a clip.

    frames  the files of the frames that the run uses, in order
    total   the number of frames in the folder
    """

    path: Path
    frames: tuple[Path, ...]
    total: int

    @property
    def base(self) -> Path:
        return self.path

    @property
    def frame_count(self) -> int:
        return len(self.frames)

    @property
    def is_cut(self) -> bool:
        return self.total > len(self.frames)

    def read(self) -> bytes:
        """Returns the first frame."""
        return self.frames[0].read_bytes()

    def fingerprint(self) -> str:
        return fingerprint(self.frames)

    def open_frames(self) -> Iterator[Any]:
        """Yields the frames as PIL images in RGB. Raises BadPicture, OSError."""
        for path in self.frames:
            try:
                yield open_picture(path.read_bytes(), to_srgb=True)
            except BadPicture as error:
                raise BadPicture(f"{path.name}: {error}") from None


@dataclass(frozen=True)
class VideoFile:
    """A video file that contains a clip.

    frame_count  the number of frames that the run uses
    frame_rate   the number of frames per second; the file may have another rate
    """

    path: Path
    frame_count: int
    frame_rate: float

    @property
    def base(self) -> Path:
        return self.path.with_suffix("")

    @property
    def total(self) -> int:
        """The number of frames of the complete file. Raises BadPicture, OSError."""
        return count_frames(self.path, self.frame_rate)

    @property
    def is_cut(self) -> bool:
        return self.total > self.frame_count

    def read(self) -> bytes:
        """Returns the first frame as PNG. Raises BadPicture, OSError."""
        frame = next(read_frames(self.path, self.frame_rate, 1))
        buffer = io.BytesIO()
        frame.save(buffer, format="PNG")
        return buffer.getvalue()

    def fingerprint(self) -> str:
        return f"{fingerprint([self.path])}:{self.frame_rate:g}"

    def open_frames(self) -> Iterator[Any]:
        """Yields the frames as PIL images in RGB. Raises BadPicture, OSError."""
        yield from read_frames(self.path, self.frame_rate, self.frame_count)


Clip = FrameFolder | VideoFile
PathContent = FileContent | Clip
Content = PathContent | ParquetContent  # where a picture or clip is stored
"""Where the bytes of one picture or clip are. `read` returns the bytes of the picture or of the
first frame, and `fingerprint` returns a hash; both raise OSError.
"""


def count_content_frames(content: Content) -> int:
    """Returns the number of frames that the run uses; 1 for a picture."""
    return content.frame_count if isinstance(content, Clip) else 1


@dataclass(frozen=True)
class ClipSettings:
    """Describes the clips of a run.

    frames      the number of frames of each clip
    frame_rate  the number of frames per second
    """

    frames: int
    frame_rate: float


@dataclass(frozen=True)
class Picture:
    """A picture with its captions. Each step uses one of the captions, chosen at random.

    origin       the picture's file, or the row of the table that names the picture
    mask         the parts of the picture where the loss is counted; None if it is counted
                 everywhere
    controls     the pictures before the edit, for a model that edits pictures
    repeats      how many rows of an epoch use this picture
    weight       the factor by which its loss is multiplied
    resolutions  the resolutions in which it is used; empty for the run's resolution
    """

    content: Content
    captions: tuple[str, ...]
    origin: str
    mask: Content | None = None
    controls: tuple[Content, ...] = ()
    repeats: int = 1
    weight: float = 1.0
    resolutions: tuple[int, ...] = ()


CAPTION_SUFFIXES = (".txt", ".caption")  # endings of the files with the caption of a picture
MAX_CAPTION_BYTES = 1 << 20  # limit of one caption and of a caption file; encoders read 2 KB
NO_CAPTION = "no caption: there is no .txt or .caption file with the same name"
# tables of pictures, as the library `datasets` names them
METADATA_FILES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
ReportBad = Callable[[str, str], None]
"""A function that records a bad row: it receives the row's file or location, and the reason."""


def read_captioned_pictures(
    files: list[Path],
    contents: Iterable[PathContent],
    report_bad: ReportBad,
    *,
    uncaptioned: str = "error",
) -> Iterator[Picture]:
    """Yields each picture or clip of a folder with the captions in its text file. The text file has
    one caption per line. A run on pictures ignores videos, with their captions.

    files        all files of the folder
    uncaptioned  the setting `images.uncaptioned`
    """
    stems: dict[Path, Path] = {}
    for content in contents:
        path = content.path
        same_stem = stems.setdefault(content.base, path)
        if same_stem is not path:
            report_bad(str(path), f"{same_stem.name} has the same caption file: rename one")
            continue
        if uncaptioned != "error" and not caption_files(content.base):
            if uncaptioned == "empty":
                yield Picture(content, ("",), str(path))
            continue
        try:
            captions = read_captions(content.base)
        except BadPicture as error:
            report_bad(str(path), str(error))
        else:
            yield Picture(content, captions, str(path))
    for path in report_unreadable(files, report_bad):
        stems.setdefault(path.with_suffix(""), path)
    others = {
        path.with_suffix(""): path
        for path in files
        if path.suffix not in CAPTION_SUFFIXES and (is_video(path) or not is_picture(path))
    }
    for path in files:
        base = path.with_suffix("")
        if path.suffix not in CAPTION_SUFFIXES or base in stems:
            continue
        other = others.get(base)
        if other is None:
            report_bad(str(path), "a caption without a picture")
        elif not is_video(other):
            report_bad(str(path), f"a caption without a picture: {other.name} is not read")


def caption_files(base: Path) -> list[Path]:
    """Returns the caption files of a picture or clip. `base` is their path without the ending."""
    candidates = [base.with_name(base.name + suffix) for suffix in CAPTION_SUFFIXES]
    return [path for path in candidates if path.is_file()]


def read_captions(base: Path) -> tuple[str, ...]:
    """Returns the captions in a picture's text file, which has one caption per line. An empty file
    means that the caption is empty. Raises BadPicture.

    base  the path of the text file without its ending
    """
    captions_by_file: dict[str, tuple[str, ...]] = {}
    for text in caption_files(base):
        try:
            lines = [" ".join(line.split()) for line in read_caption_file(text).splitlines()]
        except UnicodeDecodeError:
            raise BadPicture(f"{text.name} is not text in UTF-8: save it as UTF-8") from None
        captions_by_file[text.name] = tuple(dict.fromkeys(line for line in lines if line)) or ("",)
    if not captions_by_file:
        raise BadPicture(_missing_caption_reason(base))
    if len(set(captions_by_file.values())) > 1:
        raise BadPicture(f"{' and '.join(captions_by_file)} disagree: remove one")
    return next(iter(captions_by_file.values()))


def _missing_caption_reason(base: Path) -> str:
    """Returns NO_CAPTION, or where the captions of the picture may be. The library `datasets` writes
    a metadata file into each subfolder (train, test).
    """
    metadata = find_metadata(base.parent)
    if metadata is None:
        return NO_CAPTION
    return f"no caption: {metadata} is read only if images.train names its folder, {base.parent}"


def read_caption_file(file: Path) -> str:
    """Reads a file of captions. Raises BadPicture if the file is larger than MAX_CAPTION_BYTES, and
    UnicodeDecodeError if it is neither valid UTF-8 nor UTF-16 with a byte order mark, which
    Notepad writes as "Unicode".
    """
    size = file.stat().st_size
    if size > MAX_CAPTION_BYTES:
        raise BadPicture(
            f"{file.name} has {size:,} bytes: captions have at most {MAX_CAPTION_BYTES:,}"
        )
    content = file.read_bytes()
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return content.decode("utf-16" if is_utf16 else "utf-8-sig")


def list_files(folder: Path) -> list[Path]:
    """Returns the files of a folder and its subfolders. Run folders are left out, because they
    contain sample pictures.
    """
    files = sorted(
        file for file in folder.rglob("*") if file.is_file() and not file.name.startswith(".")
    )
    return exclude_runs(files, folder)[0]


def readable_pictures(files: list[Path]) -> list[Path]:
    """Returns the files that are pictures in a format that can be read."""
    return [path for path in files if is_picture(path) and unreadable_reason(path.suffix) is None]


def list_contents(
    files: list[Path], folder: Path, clips: ClipSettings | None, report_bad: ReportBad
) -> list[PathContent]:
    """Returns the pictures of a folder, or its clips if the run trains on clips. Each subfolder with
    pictures is a clip, and so is each video file. Raises UsageError if a package is missing that
    reads the video files.

    files  the files of the folder and of its subfolders
    clips  None if the run trains on pictures
    """
    pictures = readable_pictures(files)
    if clips is None:
        return [FileContent(path) for path in pictures]
    videos = [path for path in files if is_video(path)]
    refuse_without_pyav(videos)
    frames: dict[Path, list[Path]] = {}
    for path in pictures:
        if not is_video(path):
            frames.setdefault(path.parent, []).append(path)
    if loose_pictures := frames.pop(folder, []):
        report_bad(
            str(folder),
            f"{pluralise(len(loose_pictures), 'picture')} outside of a clip: with images.frames,"
            " each clip is a video file, or a subfolder that contains its frames. Pictures need a"
            " folder of their own, with {name: FOLDER, frames: 1}",
        )
    contents: list[PathContent] = [_video_file(path, clips) for path in videos]
    contents += [frame_folder(path, frames[path], clips) for path in frames]
    return sorted(contents, key=lambda content: content.path)


def _video_file(path: Path, clips: ClipSettings) -> VideoFile:
    return VideoFile(path, clips.frames, clips.frame_rate)


def frame_folder(path: Path, frames: list[Path], clips: ClipSettings) -> FrameFolder:
    """Returns the clip whose frames are these pictures. They are sorted by the numbers in their
    names, so that `frame_2` comes before `frame_10`.
    """
    frames = sorted(frames, key=lambda file: _natural_key(file.name))
    return FrameFolder(path, tuple(frames[: clips.frames]), len(frames))


def _natural_key(name: str) -> list[tuple[int, str]]:
    parts = re.split(r"(\d+)", name)
    return [(int(part), part) if i % 2 else (0, part) for i, part in enumerate(parts)]


def short_clip_reason(clip: Clip, clips: ClipSettings) -> str | None:
    """Returns the reason why a clip has too few frames, or None. Raises BadPicture, OSError."""
    total = clip.total
    if total >= clips.frames:
        return None
    rate = f" at {clips.frame_rate:g} per second" if isinstance(clip, VideoFile) else ""
    return f"{pluralise(total, 'frame')}{rate}, and {clips.frames} are needed (images.frames)"


def report_unreadable(files: list[Path], report_bad: ReportBad) -> list[Path]:
    """Finds the pictures whose format cannot be read. Reports each of them as bad, and returns
    them.
    """
    unreadable = []
    for path in files:
        reason = unreadable_reason(path.suffix)
        if reason is not None:
            report_bad(str(path), reason)
            unreadable.append(path)
    return unreadable


def is_picture(path: Path) -> bool:
    return path.suffix.lower() in PICTURE_SUFFIXES


def count_other_files(files: list[Path], read_files: Iterable[Path]) -> Counter[str]:
    """Counts the files that are neither pictures nor in `read_files`. Returns the counts by file
    ending.
    """
    read_paths = set(read_files)
    other_files = [path for path in files if not is_picture(path) and path not in read_paths]
    return Counter(path.suffix.lower() or "no ending" for path in other_files)


def find_metadata(folder: Path) -> Path | None:
    """Returns the metadata file with the captions of the folder's pictures. Returns None if there
    is no such file.
    """
    return next((folder / name for name in METADATA_FILES if (folder / name).is_file()), None)


def pictures_by_name(folder: Path) -> dict[str, Path]:
    """Returns the pictures of a folder by name. The name is the path relative to the folder,
    without the suffix. These pictures belong to the training pictures with the same names, for
    example as their masks.
    """
    return {
        picture.relative_to(folder).with_suffix("").as_posix(): picture
        for picture in readable_pictures(list_files(folder))
    }


# column -> names that it may have in a table of pictures
COLUMN_NAMES: Mapping[str, tuple[str, ...]] = {
    "image": ("image", "file_name", "image_path", "path", "file"),
    "text": ("text", "caption", "captions", "prompt"),
    "mask": ("mask", "mask_path"),
}
CLIP_COLUMN_NAMES: Mapping[str, tuple[str, ...]] = {
    **COLUMN_NAMES,
    "image": ("video", "video_path", *COLUMN_NAMES["image"]),
}
# the column names of pairs. If a column with another name has the edited picture, the column
# `image` has the picture before the edit
PAIR_COLUMN_NAMES: Mapping[str, tuple[str, ...]] = {
    "image": (
        "edited_image", "edited", "target_image", "target_img", "target", "output_image", "output", "after", *COLUMN_NAMES["image"],
    ),
    "control": (
        "control", "control_image", "control_images", "control_path", "source_image", "source_images", "source_img", "source",
        "cond_image", "condition_image", "conditioning_image", "reference_image", "reference_images", "references", "edit_image",
        "input_image", "input_images", "input", "original_image", "before", "image",
    ),
    "text": ("instruction", "edit_prompt", "edit", *COLUMN_NAMES["text"]),
    "mask": COLUMN_NAMES["mask"],
}  # fmt: skip
TABLE_ENDINGS = (*JSON_ENDINGS, ".csv", ".tsv", ".parquet")


def read_table_pictures(
    file: Path,
    columns: Mapping[str, str] | None,
    key: str,
    report_bad: ReportBad,
    *,
    has_controls: bool = False,
    clips: ClipSettings | None = None,
) -> Iterator[Picture]:
    """Yields the pictures or the clips of a table. Paths in the table are relative to the folder of the file. If
    several rows name the same picture, it is yielded once, with several captions, at the position
    of its first row.

    columns       the names of the file's columns for `image`, `text`, `mask` and `control`
    key           the setting that names the file, for messages
    has_controls  whether each row has a picture before the edit
    clips         set if each row names a clip and not a picture
    Raises        UsageError if the file does not have these columns, or if it is not a table
    """
    pictures: dict[Any, Picture] = {}
    names: TableColumns | None = None
    for record, cells in _read_rows(file):
        if record.error or not isinstance(record.value, dict):
            report_bad(record.location, record.error or "expected an object")
            continue
        if names is None:
            if clips is not None:
                known_names = CLIP_COLUMN_NAMES
            else:
                known_names = PAIR_COLUMN_NAMES if has_controls else COLUMN_NAMES
            names = _match_columns(file, record.value, columns or {}, key, known_names)
        try:
            name, picture = _row_picture(record, names, file, cells, clips)
        except BadPicture as error:
            report_bad(record.location, str(error))
            continue
        previous = pictures.get(name)
        if previous is None:
            pictures[name] = picture
        else:
            pictures[name] = replace(
                previous, captions=tuple(dict.fromkeys(previous.captions + picture.captions))
            )
    yield from pictures.values()


def _read_rows(file: Path) -> Iterator[tuple[Record, tuple[int, int]]]:
    """Yields each row with the number of its row group and its position in this group. If the file
    is not a Parquet file, both numbers are 0.
    """
    positions = _parquet_positions(file) if file_suffix(file) == ".parquet" else repeat((0, 0))
    return zip(read_records(file, str(file)), positions)


def _parquet_positions(file: Path) -> Iterator[tuple[int, int]]:
    import pyarrow.parquet as pq

    metadata = pq.read_metadata(file)
    for group in range(metadata.num_row_groups):
        for row in range(metadata.row_group(group).num_rows):
            yield group, row


@dataclass(frozen=True)
class TableColumns:
    """The names of a table's columns. Several pictures before the edit are in one column of lists,
    or each of them is in a column of its own.
    """

    image: str
    text: str
    mask: str | None = None
    controls: tuple[str, ...] = ()


def _match_columns(
    file: Path,
    row: Mapping[str, Any],
    columns: Mapping[str, str],
    key: str,
    known_names: Mapping[str, tuple[str, ...]],
) -> TableColumns:
    """Finds the columns of a table by the names in its first row. Raises UsageError."""
    for field, file_column in columns.items():
        is_numbered = field == "control" and _find_control_columns(list(row), [file_column])
        if file_column not in row and not is_numbered:
            raise UsageError(
                f"{key}: {file}: no column {file_column!r} (columns.{field}): it has"
                f" {list_names(row)}"
            )
    names = dict(columns)
    for field in ("image", "text", "mask"):
        column = next(
            (name for name in known_names[field] if name in row and name not in names.values()),
            None,
        )
        if field not in names and column is not None:
            names[field] = column
    for field in ("image", "text"):
        if field not in names:
            raise UsageError(
                f"{key}: {file}: no column for the {field} ({', '.join(known_names[field])}): it has"
                f" {list_names(row)}",
                fix=f"images.columns: {{{field}: NAME}}",
            )
    controls: tuple[str, ...] = ()
    if "control" in known_names:
        other_columns = [name for name in row if name not in (names["image"], names["text"])]
        candidates = [names["control"]] if "control" in names else known_names["control"]
        controls = _find_control_columns(other_columns, candidates)
    return TableColumns(names["image"], names["text"], names.get("mask"), controls)


def _find_control_columns(columns: Sequence[str], candidates: Sequence[str]) -> tuple[str, ...]:
    """Returns the column of the picture before the edit, which has one of the candidate names. If
    there is one column for each of several pictures, such as `control_1` and `control_2`, returns
    these columns, sorted by their numbers.
    """
    for name in candidates:
        if name in columns:
            return (name,)
        pattern = re.compile(rf"{re.escape(name)}_?(\d{{1,3}})")
        matches = [match for column in columns if (match := pattern.fullmatch(column))]
        if matches:
            matches.sort(key=lambda match: int(match[1]))
            return tuple(match[0] for match in matches)
    return ()


def _row_picture(
    record: Record,
    names: TableColumns,
    file: Path,
    position: tuple[int, int],
    clips: ClipSettings | None,
) -> tuple[Any, Picture]:
    """Returns a key and the picture of a row. The key identifies the row's picture and the pictures
    before the edit, so that rows with the same pictures can be found. Raises BadPicture.
    """
    row = record.value
    key = names.text
    texts = [row.get(key)] if isinstance(row.get(key), str) else row.get(key)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise BadPicture(f"{key}: expected a caption or a list of them, got {row.get(key)!r:.60}")
    if sum(map(len, texts)) > MAX_CAPTION_BYTES:
        raise BadPicture(f"{key}: captions of more than {MAX_CAPTION_BYTES:,} characters")
    captions = tuple(dict.fromkeys(" ".join(text.split()) for text in texts))
    cell = row.get(names.image)
    content: Content
    if clips is None:
        content = _cell_content(cell, names.image, file, position)
    else:
        content = _cell_clip(cell, names.image, file, clips)
    mask = None
    if names.mask is not None and not _is_empty(row.get(names.mask)):
        mask = _cell_content(row[names.mask], names.mask, file, position)
    controls = _read_controls(row, names.controls, file, position)
    name = record.location if isinstance(content, ParquetContent) else str(content.path)
    picture = Picture(content, captions, record.location, mask=mask, controls=controls)
    return (name, controls), picture


def _is_empty(cell: Any) -> bool:
    return cell is None or cell in ("", [])


def _read_controls(
    row: Mapping[str, Any], columns: Sequence[str], file: Path, position: tuple[int, int]
) -> tuple[Content, ...]:
    """Returns the pictures before the edit of a row. A row may have fewer of them than another row,
    but an empty cell before a picture is an error. Raises BadPicture.
    """
    controls: list[Content] = []
    empty_column = None
    for column in columns:
        cell = row.get(column)
        if _is_empty(cell):
            empty_column = empty_column or column
            continue
        if empty_column is not None:
            raise BadPicture(f"{empty_column}: empty, and {column} has a picture")
        if isinstance(cell, str) and cell.strip().startswith("["):
            cell = _parse_list(cell)
        if not isinstance(cell, list):
            controls.append(_cell_content(cell, column, file, position))
            continue
        for index, item in enumerate(cell):
            content = _cell_content(item, f"{column}[{index}]", file, position)
            if isinstance(content, ParquetContent):
                content = replace(content, column=column, index=index)
            controls.append(content)
    return tuple(controls)


def _parse_list(cell: str) -> Any:
    """Parses a cell of a CSV file that contains a JSON list of files. Returns any other text
    unchanged.
    """
    try:
        return json.loads(cell)
    except ValueError:
        return cell


def _cell_content(cell: Any, column: str, file: Path, position: tuple[int, int]) -> Content:
    """Returns the picture that a cell of a Parquet file contains. Raises BadPicture."""
    if isinstance(cell, dict) and isinstance(cell.get("path"), str) and not cell.get("bytes"):
        cell = cell["path"]
    if isinstance(cell, bytes) or (isinstance(cell, dict) and isinstance(cell.get("bytes"), bytes)):
        return ParquetContent(file, column, *position)
    if isinstance(cell, list):
        raise BadPicture(f"{column}: {len(cell)} pictures in one row: expected one")
    if not isinstance(cell, str) or not cell.strip():
        raise BadPicture(f"{column}: expected a picture's file, got {cell!r:.60}")
    content = resolve_picture(cell, file.parent)
    if isinstance(content, bytes):
        raise BadPicture(
            f"{column}: a data: URL, which is not read here: write it to a file, or the rows to"
            " Parquet"
        )
    return FileContent(content)


def _cell_clip(cell: Any, column: str, file: Path, clips: ClipSettings) -> Clip:
    """Returns the clip that a row names. Raises BadPicture."""
    if isinstance(cell, dict) and isinstance(cell.get("path"), str):
        cell = cell["path"]
    if not isinstance(cell, str) or not cell.strip():
        raise BadPicture(f"{column}: expected a video file or a folder of frames, got {cell!r:.60}")
    path = file.parent / cell
    # unlike Path.is_file and Path.is_dir also False for a text that is longer than any name
    if os.path.isfile(path):
        if not is_video(path):
            raise BadPicture(
                f"{column}: {cell:.100}: not a video file ({' '.join(VIDEO_SUFFIXES)})"
            )
        refuse_without_pyav([path])
        return _video_file(path, clips)
    if not os.path.isdir(path):
        raise BadPicture(f"{column}: {cell:.100}: no such video file or folder of frames")
    frames = [frame for frame in readable_pictures(list_files(path)) if frame.parent == path]
    if not frames:
        raise BadPicture(f"{column}: {cell:.100}: no pictures in this folder")
    return frame_folder(path, frames, clips)
