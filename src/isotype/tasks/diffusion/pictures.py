"""Collects the pictures and captions of a run, and checks them before anything is computed.

One error lists all pictures that cannot be used. If `images.on_bad_row` is `skip` and there are not
too many of them, they are left out and listed instead. The class pictures for prior preservation
are also pictures of a run.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from ...config.kind import PICTURE_SUFFIXES
from ...config.schema import ImagesSection
from ...config.sources import PictureSource, picture_sources
from ...data.bad_rows import BAD_ROWS_FILE, MAX_LOCATIONS, BadRow, list_by_reason, normalise_reason
from ...data.progress import track_progress
from ...data.read import file_suffix
from ...errors import UsageError
from .picture_files import (
    CAPTION_SUFFIXES,
    MAX_CAPTION_BYTES,
    NO_CAPTION,
    TABLE_ENDINGS,
    Clip,
    ClipSettings,
    FileContent,
    PathContent,
    Picture,
    count_other_files,
    find_metadata,
    is_picture,
    list_contents,
    list_files,
    pictures_by_name,
    read_captioned_pictures,
    read_table_pictures,
    readable_pictures,
    report_unreadable,
    short_clip_reason,
)
from .pixels import BadPicture, thumbnail_url
from .video_files import is_video

EXAMPLE_COUNT = 6  # number of example pictures in the report


@dataclass
class RunPictures:
    """The pictures of a run.

    train                   the training pictures, with the regularisation pictures at the end
    bad_pictures            the pictures that cannot be used
    regularisation_count    the number of regularisation pictures
    has_controls            whether each picture has controls, which are the pictures before the edit
    takes_several_controls  whether a picture may have several controls
    missing_class_pictures  the class pictures that do not exist yet
    other_files             folder -> file ending -> number of files that are not pictures and were
                            not read
    unused_repeats          subfolder, or folder of a source, whose name begins with a number as in
                            `10_sks dog` -> this number, which kohya's scripts use as repeats
    trains_on_all           whether no picture is held out because there are few of them
    frame_rate              the number of frames of a clip per second
    """

    train: list[Picture]
    eval: list[Picture]
    bad_pictures: UnusablePictures
    regularisation_count: int = 0
    has_controls: bool = False
    takes_several_controls: bool = False
    missing_class_pictures: list[MissingPicture] = field(default_factory=list)
    other_files: dict[str, Counter[str]] = field(default_factory=dict)
    unused_repeats: dict[Path, int] = field(default_factory=dict)
    trains_on_all: bool = False
    frame_rate: float = 1.0
    _first_captions: dict[Any, tuple[str, tuple[str, ...]]] = field(default_factory=dict)

    @property
    def all_pictures(self) -> list[Picture]:
        return [*self.train, *self.eval]

    def unmasked_pictures(self) -> list[Picture]:
        """Returns the training pictures without a mask, if other training pictures have a mask. In
        a picture without a mask, the loss is counted everywhere.
        """
        subject_pictures = self.train[: len(self.train) - self.regularisation_count]
        unmasked = [picture for picture in subject_pictures if picture.mask is None]
        return unmasked if len(unmasked) < len(subject_pictures) else []

    def unmasked_lines(self) -> list[str]:
        unmasked = self.unmasked_pictures()
        if not unmasked:
            return []
        first = Path(unmasked[0].origin).name
        return [
            f"{len(unmasked)} training pictures have no mask and are learnt whole: {first}, ..."
        ]

    def cut_clip_lines(self) -> list[str]:
        """Returns a line about the clips that have more frames than the run uses."""
        contents = {picture.content for picture in self.all_pictures}
        clips = [content for content in contents if isinstance(content, Clip)]
        cut_clips = [clip for clip in clips if clip.is_cut]
        if not cut_clips:
            return []
        frame_counts = sorted({clip.frame_count for clip in cut_clips})
        return [
            f"clips that are longer than images.frames: {len(cut_clips)} of {len(clips)}; their"
            f" first {' or '.join(map(str, frame_counts))} frames are used"
        ]

    def other_file_lines(self) -> list[str]:
        """Returns lines about the files that were not read, for the header and the plan."""
        lines = []
        for folder, counts in self.other_files.items():
            kinds = ", ".join(f"{number} {ending}" for ending, number in sorted(counts.items()))
            lines.append(f"not read in {folder}: {kinds}")
        return lines

    def unused_repeats_lines(self) -> list[str]:
        """Returns a line about the folders whose names are those of kohya's scripts with repeats."""
        if not self.unused_repeats:
            return []
        numbers = sorted(self.unused_repeats.items())
        names = ", ".join(folder.name for folder, _ in numbers)
        entries = [f"{{name: {folder}, repeats: {repeats}}}" for folder, repeats in numbers]
        return [
            f"used once in an epoch: {names}. The numbers of these names are not read as repeats,"
            f" as kohya's scripts do; with repeats: images.train: [{', '.join(entries)}]"
        ]

    def examples(self) -> list[dict[str, Any]]:
        """Returns thumbnails of the first training pictures with their captions, for the report."""
        examples = []
        for picture in self.train[:EXAMPLE_COUNT]:
            with suppress(BadPicture, OSError):
                pictures = [
                    thumbnail_url(content.read())
                    for content in (*picture.controls, picture.content)
                ]
                parts = [
                    {"text": caption + "\n", "learnt": False}
                    for caption in picture.captions[:EXAMPLE_COUNT]
                ]
                times = f", {picture.repeats} times an epoch" if picture.repeats > 1 else ""
                examples.append(
                    {
                        "which": f"{Path(picture.origin).name}{times}",
                        "parts": parts,
                        "pictures": pictures,
                    }
                )
        return examples


FEWEST_TO_HOLD_OUT = 20  # pictures; of fewer none is held out by default
DEFAULT_SHARE = 0.05  # of the pictures that are held out for evaluation


def collect_pictures(
    images: ImagesSection,
    *,
    seed: int,
    has_controls: bool = False,
    frame_rate: float = 1.0,
    takes_several_controls: bool = False,
) -> RunPictures:
    """Collects the training and evaluation pictures. Raises a UsageError that lists every picture
    that cannot be used.

    has_controls            whether each picture needs a picture before the edit
    takes_several_controls  whether a picture may have several pictures before the edit
    frame_rate              the number of frames of a clip per second
    """
    from ...data.rows import epoch_order

    result = RunPictures(
        [],
        [],
        UnusablePictures(skip=images.on_bad_row == "skip"),
        has_controls=has_controls,
        frame_rate=frame_rate,
        takes_several_controls=takes_several_controls,
    )
    train = apply_caption_settings(
        _attach_masks(_read_sources(images, "train", result)[: images.limit], images, result),
        images,
        seed=seed,
    )
    regularisation = _read_sources(images, "regularisation", result)
    evaluation = _read_sources(images, "eval", result) if images.eval is not None else None
    result.bad_pictures.refuse_unusable(len(train) + len(regularisation) + len(evaluation or ()))
    if evaluation is None:
        held_out_count = _held_out_count(images.eval_split, len(train))
        result.trains_on_all = images.eval_split is None and not held_out_count
        held_out_indices = set(
            epoch_order(len(train), seed=seed, epoch=0, shuffle=True)[:held_out_count]
        )
        train, evaluation = (
            [picture for i, picture in enumerate(train) if i not in held_out_indices],
            [picture for i, picture in enumerate(train) if i in held_out_indices],
        )
    train, regularisation, eval_pictures = map(
        _split_by_resolution,
        (train, regularisation, [replace(picture, repeats=1) for picture in evaluation]),
    )
    if any(source.draw is not None for source in picture_sources(images, "regularisation")):
        train, regularisation = balance_repeats(train, regularisation)
    result.train = [*train, *regularisation]
    result.eval = eval_pictures
    result.regularisation_count = len(regularisation)
    return result


def _held_out_count(share: float | None, pictures: int) -> int:
    """Returns how many training pictures are held out for evaluation. If `share` is None, the
    default share is used, and no picture of a small set is held out. Every picture of a small set
    is needed for training, and an evaluation on one picture says little about a model.
    """
    if share is None:
        if pictures < FEWEST_TO_HOLD_OUT:
            return 0
        share = DEFAULT_SHARE
    if not share:
        return 0
    return min(pictures - 1, max(1, round(share * pictures)))


def _split_by_resolution(pictures: Iterable[Picture]) -> list[Picture]:
    """Repeats each picture once for each of its resolutions. Each copy has only one resolution."""
    return [
        replace(picture, resolutions=picture.resolutions[i : i + 1])
        for picture in pictures
        for i in range(len(picture.resolutions) or 1)
    ]


def _read_sources(images: ImagesSection, side: str, result: RunPictures) -> list[Picture]:
    pictures: list[Picture] = []
    for source in picture_sources(images, side):
        bad_count = len(result.bad_pictures.rows)
        if source.draw is not None:
            source_pictures, missing_pictures = read_class_pictures(
                source, has_controls=result.has_controls
            )
            result.missing_class_pictures += missing_pictures
        else:
            source_pictures = list(_read_source(source, images, result))
        if result.has_controls:
            source_pictures = _attach_controls(source_pictures, source, result)
        if (
            not source_pictures
            and len(result.bad_pictures.rows) == bad_count
            and images.uncaptioned != "skip"
        ):
            raise UsageError(_empty_source_message(source))
        if source.frames > 1:
            source_pictures = _leave_out_short_clips(source_pictures, source, result)
        _report_disagreeing(source_pictures, result)
        settings = {
            "repeats": source.repeats,
            "weight": source.weight,
            "resolutions": source.resolution,
        }
        pictures += [replace(picture, **settings) for picture in source_pictures]  # type: ignore[arg-type]  # each is of its field's type
    return pictures


def _clip_settings(source: PictureSource, result: RunPictures) -> ClipSettings | None:
    """Returns the settings of the source's clips. Returns None if it contains pictures."""
    if source.frames == 1:
        return None
    return ClipSettings(source.frames, result.frame_rate)


def _empty_source_message(source: PictureSource) -> str:
    if source.frames == 1:
        return f"{source.key}: {source.name}: no pictures there ({' '.join(PICTURE_SUFFIXES)})"
    return f"{source.key}: {source.name}: no clips there (video files, or subfolders that contain pictures)"


def _leave_out_short_clips(
    pictures: Sequence[Picture], source: PictureSource, result: RunPictures
) -> list[Picture]:
    """Reports the clips of a source that have too few frames. Returns the other clips."""
    clips = _clip_settings(source, result)
    assert clips is not None
    long_clips = []
    for picture in pictures:
        assert isinstance(picture.content, Clip)
        try:
            reason = short_clip_reason(picture.content, clips)
        except (BadPicture, OSError) as error:
            reason = str(error)
        if reason is None:
            long_clips.append(picture)
        else:
            result.bad_pictures.add(picture.origin, reason)
    return long_clips


def _read_source(
    source: PictureSource, images: ImagesSection, result: RunPictures
) -> Iterable[Picture]:
    path = Path(source.name).expanduser()
    if not path.exists():
        raise UsageError(f"{source.key}: {source.name}: no such file or folder")
    if path.is_file():
        if source.caption is not None:
            raise UsageError(
                f"{source.key}.caption: has no effect: {source.name} has captions of its own; only"
                " a folder takes one"
            )
        if file_suffix(path) not in TABLE_ENDINGS:
            raise UsageError(
                f"{source.key}: {source.name}: expected a folder of pictures, or a file that ends"
                f" in {' '.join(TABLE_ENDINGS)}"
            )
        return read_table_pictures(
            path,
            source.columns,
            source.key,
            result.bad_pictures.add,
            has_controls=result.has_controls,
            clips=_clip_settings(source, result),
        )
    files = _files_of_source(path, images)
    if source.repeats == 1:
        result.unused_repeats |= _repeats_in_names(path, files)
    clips = _clip_settings(source, result)
    contents = list_contents(files, path, clips, result.bad_pictures.add)
    ignores_caption_files = source.caption is not None or images.captions == "names"
    metadata = None if ignores_caption_files else find_metadata(path)
    caption_files = [file for file in files if file.suffix in CAPTION_SUFFIXES]
    read_files = (
        [] if ignores_caption_files else [*caption_files, *([metadata] if metadata else [])]
    )
    if clips is not None:
        read_files += [file for file in files if is_video(file)]
    if other_files := count_other_files(files, read_files):
        result.other_files[source.name] = other_files
    if ignores_caption_files:
        report_unreadable(files, result.bad_pictures.add)
        return [
            Picture(
                content,
                (caption_of_name(content.base) if source.caption is None else source.caption,),
                str(content.path),
            )
            for content in contents
        ]
    if metadata is not None:
        return _read_with_metadata(files, contents, metadata, source, result)
    return read_captioned_pictures(
        files, contents, result.bad_pictures.add, uncaptioned=images.uncaptioned
    )


_NAME_WITH_REPEATS = re.compile(r"([1-9]\d?)_.+")  # `2024_holiday` is no name of kohya's scripts


def _repeats_in_names(folder: Path, files: Iterable[Path]) -> dict[Path, int]:
    """Returns the folder and its direct subfolders whose names begin with a number and `_`, if the
    number is above 1. kohya's scripts use the pictures of such a folder so many times in an epoch.
    """
    parents = {file.parent for file in files if is_picture(file)}
    folders = [parent for parent in parents if folder in (parent, parent.parent)]
    matches = {path: _NAME_WITH_REPEATS.fullmatch(path.name) for path in folders}
    numbers = {path: int(match[1]) for path, match in matches.items() if match is not None}
    return {path: number for path, number in numbers.items() if number > 1}


def _files_of_source(folder: Path, images: ImagesSection) -> list[Path]:
    """Returns the files of a folder and its subfolders. If `images.masks` is one of the subfolders,
    its files are left out.
    """
    files = list_files(folder)
    if images.masks is None:
        return files
    masks = Path(images.masks).expanduser().resolve()
    if not masks.is_relative_to(folder.resolve()) or masks == folder.resolve():
        return files
    return [path for path in files if not path.resolve().is_relative_to(masks)]


def _read_with_metadata(
    files: list[Path],
    contents: list[PathContent],
    file: Path,
    source: PictureSource,
    result: RunPictures,
) -> Iterable[Picture]:
    """Yields the pictures of a folder that are listed in its metadata file. A picture that is not
    listed cannot be used, because it has no caption. If each picture has pictures before the edit
    (its controls), all of them can be in the same folder. Then some files of the folder are only
    pictures before an edit, so this function yields one picture for each row of the metadata file
    and not for each file.
    """
    rows = list(
        read_table_pictures(
            file,
            source.columns,
            source.key,
            result.bad_pictures.add,
            has_controls=result.has_controls,
            clips=_clip_settings(source, result),
        )
    )
    row_by_path = {
        content.path: row
        for row in rows
        for content in (row.content, *row.controls)
        if isinstance(content, PathContent)
    }
    report_unreadable(files, result.bad_pictures.add)
    for content in contents:
        path = content.path
        caption_file = content.base.with_name(f"{content.base.name}.txt")
        if path not in row_by_path:
            result.bad_pictures.add(str(path), f"no caption: {file.name} does not name it")
        elif result.has_controls:
            continue
        elif (
            caption_file.is_file()
            and _read_words(caption_file) != " ".join(row_by_path[path].captions).split()
        ):
            result.bad_pictures.add(
                str(path), f"{file.name} and {caption_file.name} disagree: remove one"
            )
        else:
            yield row_by_path[path]
    if result.has_controls:
        yield from rows


def _read_words(caption_file: Path) -> list[str]:
    """Returns the words of a caption file. If the file is too large, only its beginning is read."""
    with caption_file.open("rb") as file:
        return file.read(MAX_CAPTION_BYTES + 1).decode("utf-8", "replace").split()


def _report_disagreeing(pictures: Iterable[Picture], result: RunPictures) -> None:
    """Reports a picture as bad if another source has different captions for the same picture."""
    for picture in pictures:
        if not isinstance(picture.content, PathContent):
            continue
        key = (str(picture.content.path.resolve()), picture.controls)
        first_origin, captions = result._first_captions.setdefault(
            key, (picture.origin, picture.captions)
        )
        if captions != picture.captions:
            result.bad_pictures.add(
                picture.origin,
                f"{first_origin} gives {picture.content.path.name} another caption"
                f" ({captions[0]!r:.60})",
            )


def _attach_masks(
    pictures: list[Picture], images: ImagesSection, result: RunPictures
) -> list[Picture]:
    """Adds the masks of `images.masks` to the pictures with the same names."""
    if images.masks is None:
        return pictures
    folder = Path(images.masks).expanduser()
    if not folder.is_dir():
        raise UsageError(f"images.masks: {images.masks}: no such folder")
    masks = pictures_by_name(folder)
    roots = [Path(source.name).expanduser() for source in picture_sources(images, "train")]
    used_names = set()
    masked_pictures = []
    for picture in pictures:
        name = _relative_name(picture, roots)
        used_names.add(name)
        masked_pictures.append(
            replace(picture, mask=FileContent(masks[name]))
            if name in masks and picture.mask is None
            else picture
        )
    for name, path in masks.items() if not images.limit else ():
        if name not in used_names:
            result.bad_pictures.add(str(path), "a mask without a picture")
    return masked_pictures


def _attach_controls(
    pictures: Sequence[Picture], source: PictureSource, result: RunPictures
) -> list[Picture]:
    """Finds the pictures before the edit for each edited picture, and adds them. These are the
    pictures that the row names, or the pictures with the same name in the source's `controls`. An
    edited picture for which one of them is missing is left out and reported.
    """
    root = Path(source.name).expanduser()
    folders = {name: _read_control_folder(name, source, root) for name in source.controls}
    report_bad = result.bad_pictures.add
    paired_pictures = []
    for picture in pictures:
        name = _relative_name(picture, [root])
        missing = [folder for folder, files in folders.items() if name not in files]
        if picture.controls or not folders:
            missing = []
        elif not missing:
            files = tuple(FileContent(files[name]) for files in folders.values())
            picture = replace(picture, controls=files)
        if missing:
            hint = f"{', '.join(missing)} has none of its name"
            report_bad(picture.origin, f"no picture before the edit: {hint}")
        elif not picture.controls:
            hint = "a row names it (control), or images.controls its folder"
            report_bad(picture.origin, f"no picture before the edit: {hint}")
        elif len(picture.controls) > 1 and not result.takes_several_controls:
            report_bad(
                picture.origin,
                f"{len(picture.controls)} pictures before the edit, and this model takes one",
            )
        else:
            paired_pictures.append(picture)
    return paired_pictures


def _read_control_folder(name: str, source: PictureSource, root: Path) -> dict[str, Path]:
    """Returns the pictures of one folder of the source's `controls` by name. Raises UsageError."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise UsageError(f"{source.key}: controls: {name}: no such folder")
    if folder.resolve().is_relative_to(root.resolve()):
        raise UsageError(
            f"{source.key}: controls: {name} lies in {source.name}, which holds the edited ones",
            fix="move it",
        )
    return pictures_by_name(folder)


def _relative_name(picture: Picture, roots: Sequence[Path]) -> str:
    """Returns the picture's path relative to the folder of its source, without the suffix."""
    if not isinstance(picture.content, PathContent):
        return ""
    base = picture.content.base
    for root in roots:
        folder = root if root.is_dir() else root.parent
        if base.is_relative_to(folder):
            return base.relative_to(folder).as_posix()
    return base.name


UNCAPTIONED_FIX = (
    "write a .txt file for each picture; or set one caption for all pictures,"
    " images.train: [{name: FOLDER, caption: a photo of sks dog}]; or set images.uncaptioned to"
    " empty or skip"
)
MAX_SKIPPED_SHARE = 0.05  # share of all pictures; above it the data as a whole is wrong


class UnusablePictures:
    """The pictures of a run that cannot be used. Each has its file or row and the reason. They are
    in the order in which they were found.

    skip  whether `images.on_bad_row: skip` is set
    """

    def __init__(self, *, skip: bool) -> None:
        self.skip = skip
        self.rows: dict[str, BadRow] = {}

    def add(self, origin: str, reason: str) -> None:
        self.rows.setdefault(origin, BadRow(origin, reason))

    def refuse_unusable(self, usable_count: int, *, fix: str | None = None) -> None:
        """Raises a UsageError that lists the bad pictures. Does nothing if `images.on_bad_row` is
        `skip` and few pictures are bad.

        usable_count  number of pictures that can be used
        fix           the advice in the error message; `images.on_bad_row: skip` is added to it if
                      that would help
        """
        if not self.rows:
            return
        share = len(self.rows) / (len(self.rows) + usable_count)
        if self.skip and share <= MAX_SKIPPED_SHARE:
            return
        rows = list(self.rows.values())
        kinds = Counter(normalise_reason(row.reason) for row in rows)
        if len(rows) <= MAX_LOCATIONS and len(kinds) == len(rows):
            lines = [f"{row.location}: {row.reason}" for row in rows]
        else:
            lines = [f"{len(rows):,} files cannot be used", *list_by_reason(rows, kinds)]
        if self.skip:
            lines.insert(
                0,
                f"images.on_bad_row: skip leaves out at most {MAX_SKIPPED_SHARE:.0%} of the"
                " pictures,"
                f" and these are {share:.0%}",
            )
        fixes = [fix] if fix else []
        if any(row.reason == NO_CAPTION for row in rows):
            fixes.append(UNCAPTIONED_FIX)
        if not self.skip and share <= MAX_SKIPPED_SHARE:
            fixes.append(
                f"images.on_bad_row: skip leaves them out and lists them in the run's {BAD_ROWS_FILE}"
            )
        raise UsageError(
            "\n".join(lines), fix="; or ".join(fixes) or "repair or remove these files"
        )


# --- captions: a trigger word, tags in random order, tags left out at random. Text is encoded once,
# before training. So several random forms of each caption are drawn before training, and a step
# takes one of them. The forms depend only on the seed and the caption

SEPARATOR = ","


def apply_caption_settings(
    pictures: Sequence[Picture], images: ImagesSection, *, seed: int
) -> list[Picture]:
    """Replaces the captions of pictures by the captions that are used in training, for example with
    the trigger or with shuffled tags. Raises UsageError if a setting for tags is set but no caption
    contains a comma.
    """
    wants_tags = images.tag_orders is not None
    if not wants_tags:
        for key, value in (("keep_tags", images.keep_tags), ("tag_dropout", images.tag_dropout)):
            if value:
                raise UsageError(
                    f"images.{key}: has no effect without images.tag_orders",
                    fix="images.tag_orders: 8",
                )
    elif not any(SEPARATOR in caption for picture in pictures for caption in picture.captions):
        raise UsageError(
            "images.tag_orders: no caption has tags: none contains a comma",
            fix="separate tags by commas, or remove images.tag_orders",
        )
    return [
        replace(picture, captions=_caption_forms(picture.captions, images, seed=seed))
        for picture in pictures
    ]


def _caption_forms(captions: Sequence[str], images: ImagesSection, *, seed: int) -> tuple[str, ...]:
    forms = [
        form
        for caption in captions
        for form in (
            [caption] if images.tag_orders is None else _shuffle_tags(caption, images, seed=seed)
        )
    ]
    if images.trigger:
        forms = [
            f"{images.trigger}{SEPARATOR} {form}" if form else images.trigger for form in forms
        ]
    return tuple(forms)


def _shuffle_tags(caption: str, images: ImagesSection, *, seed: int) -> list[str]:
    """Returns `images.tag_orders` variants of a caption. In each variant, the tags are shuffled and
    some tags are dropped at random. Two variants may be equal.
    """
    tags = [tag.strip() for tag in caption.split(SEPARATOR) if tag.strip()]
    first_tags = tags[: images.keep_tags]
    movable_tags = tags[images.keep_tags :]
    digest = hashlib.sha256(f"tags:{seed}:{caption}".encode()).digest()
    generator = random.Random(int.from_bytes(digest[:8], "big"))
    forms = []
    for _ in range(images.tag_orders or 1):
        other_tags = [tag for tag in movable_tags if generator.random() >= images.tag_dropout]
        generator.shuffle(other_tags)
        forms.append(f"{SEPARATOR} ".join([*first_tags, *other_tags]))
    return forms


def caption_of_name(base: Path) -> str:
    """Returns the caption that is made from a file's name without its ending. For `red_circle-2`,
    it is `red circle 2`.
    """
    return " ".join(base.name.replace("_", " ").replace("-", " ").split())


# --- class pictures for prior preservation (Ruiz et al. 2023, "DreamBooth"): the base model draws
# pictures for the caption of the class. They are trained on together with the subject's pictures,
# so that the model does not forget the class. They are drawn once, before training, into a folder
# that later runs use again

RECORD_FILE = "drawn.json"


@dataclass(frozen=True)
class MissingPicture:
    """A class picture that must still be generated.

    number  its number in the folder, counted from 1; the noise depends on this number and on the
            run's seed
    size    its side in pixels; None if it is the run's resolution
    """

    path: Path
    caption: str
    number: int
    size: int | None


def read_class_pictures(
    source: PictureSource, *, has_controls: bool = False
) -> tuple[list[Picture], list[MissingPicture]]:
    """Returns the class pictures of a source that has the setting `draw`, and a list of the class
    pictures that must still be generated. Pictures that already exist in the folder are used first.

    has_controls  whether the model edits pictures
    Raises        UsageError if the model edits pictures, because class pictures have no picture
                  before the edit, or if the source is a file
    """
    if has_controls:
        raise UsageError(
            f"{source.key}.draw: a model that edits draws from a picture, not from a caption alone",
            fix=f"remove {source.key}.draw",
        )
    folder = Path(source.name).expanduser()
    caption = source.caption or ""
    if folder.is_file():
        raise UsageError(
            f"{source.key}: {source.name}: a file; class pictures are drawn into a folder"
        )
    existing_paths = readable_pictures(list_files(folder))[: source.draw] if folder.is_dir() else []
    free_files = (
        (number, path)
        for number in count(1)
        if (path := folder / f"drawn_{number:04}.png") not in existing_paths
    )
    size = max(source.resolution, default=None)
    missing = [
        MissingPicture(path, caption, number, size)
        for (number, path), _ in zip(free_files, range((source.draw or 0) - len(existing_paths)))
    ]
    # the order in which a later run lists them
    paths = sorted([*existing_paths, *(picture.path for picture in missing)])
    return [Picture(FileContent(path), (caption,), str(path)) for path in paths], missing


def balance_repeats(
    train: Sequence[Picture], regularisation: Sequence[Picture]
) -> tuple[list[Picture], list[Picture]]:
    """Repeats the pictures of the list that has fewer rows, one after the other, until both lists
    have the same number of rows in an epoch.
    """
    rows_per_epoch = max(
        sum(picture.repeats for picture in pictures) for pictures in (train, regularisation)
    )
    return _repeat_in_turn(train, rows_per_epoch), _repeat_in_turn(regularisation, rows_per_epoch)


def _repeat_in_turn(pictures: Sequence[Picture], rows: int) -> list[Picture]:
    row_indices = [i for i, picture in enumerate(pictures) for _ in range(picture.repeats)]
    times = (
        Counter(row_indices[k % len(row_indices)] for k in range(rows))
        if row_indices
        else Counter[int]()
    )
    return [replace(picture, repeats=times[i]) for i, picture in enumerate(pictures)]


def refuse_other_class_pictures(
    sources: Sequence[PictureSource], missing: Sequence[MissingPicture], facts: dict[str, Any]
) -> None:
    """Raises UsageError if the class pictures in a folder were generated with another caption or
    model. If some pictures of the folder must still be generated, the error is also raised if any
    other setting in `facts` differs.

    facts  the settings with which the run generates class pictures, with the keys that the folder's
           record uses
    """
    incomplete_folders = {picture.path.parent for picture in missing}
    for source in sources:
        folder = Path(source.name).expanduser()
        if source.draw is None:
            continue
        try:
            recorded = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        for key, value in {"caption": source.caption, **facts}.items():
            is_compared = (
                isinstance(recorded, dict)
                and key in recorded
                and (folder in incomplete_folders or key in ("caption", "model"))
            )
            if is_compared and recorded[key] != value:
                raise UsageError(
                    f"images.regularisation: {folder}: its class pictures were drawn with {key}"
                    f" {recorded[key]!r}, not {value!r}",
                    fix=f"another folder; to go on with both: remove {RECORD_FILE} there",
                )


def write_class_pictures(
    missing: Sequence[MissingPicture], facts: dict[str, Any], png_files: Iterator[bytes]
) -> None:
    """Writes the missing class pictures. A file appears only when it is complete. So if the run is
    interrupted, the next run continues with the next picture.

    facts  the settings with which the pictures are generated; they are recorded in the folder
    png_files  yields the PNG file content of each picture, in order
    """
    for folder, caption in {picture.path.parent: picture.caption for picture in missing}.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RECORD_FILE).write_text(
            json.dumps({"caption": caption, **facts}, indent=1) + "\n", encoding="utf-8"
        )
    for picture, png in zip(track_progress(missing, "drawing class pictures"), png_files):
        temporary_path = picture.path.with_suffix(".part")
        temporary_path.write_bytes(png)
        os.replace(temporary_path, picture.path)
