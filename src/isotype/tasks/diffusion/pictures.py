"""The pictures and captions of a run, class pictures among them: found, paired and checked before
anything is computed. Pictures that cannot be used are named together in one error, or left out and
listed up to a bound.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
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
from ...data.bad_rows import FILE, PLACES, BadRow
from ...data.progress import watched
from ...data.read import ending
from ...errors import UsageError
from .picture_files import (
    CAPTIONS,
    ROW_ENDINGS,
    Complain,
    InFile,
    Picture,
    count_other_files,
    files_of,
    metadata_of,
    named_in,
    pictures_among,
    pictures_beside_captions,
    pictures_of_rows,
    unreadable_among,
)
from .pixels import BadPicture, small

EXAMPLES = 6  # pictures in the report


@dataclass
class Gathered:
    """The pictures of a run. Those of regularisation are at the end of `train`, `regularisation` of
    them; `to_draw` are not there yet. `pairs`: each has a control. `other_files`: folder -> ending
    -> the number of its files that are no pictures and were not read.
    """

    train: list[Picture]
    eval: list[Picture]
    bad: BadPictures
    regularisation: int = 0
    pairs: bool = False
    to_draw: list[ToDraw] = field(default_factory=list)
    other_files: dict[str, Counter[str]] = field(default_factory=dict)
    _captions_of: dict[Any, tuple[str, tuple[str, ...]]] = field(default_factory=dict)

    @property
    def all(self) -> list[Picture]:
        return [*self.train, *self.eval]

    def unmasked(self) -> list[Picture]:
        """Training pictures without a mask, where others have one: they are learnt whole."""
        own = self.train[: len(self.train) - self.regularisation]
        without = [picture for picture in own if picture.mask is None]
        return without if len(without) < len(own) else []

    def unmasked_lines(self) -> list[str]:
        without = self.unmasked()
        if not without:
            return []
        first = Path(without[0].where).name
        return [f"{len(without)} training pictures have no mask and are learnt whole: {first}, ..."]

    def other_file_lines(self) -> list[str]:
        """What each folder holds besides, for the header and the plan."""
        lines = []
        for folder, counts in self.other_files.items():
            kinds = ", ".join(f"{number} {ending}" for ending, number in sorted(counts.items()))
            lines.append(f"not read in {folder}: {kinds}")
        return lines

    def examples(self) -> list[dict[str, Any]]:
        """The first training pictures with their captions, small, for the report."""
        shown = []
        for picture in self.train[:EXAMPLES]:
            with suppress(BadPicture, OSError):
                pictures = [
                    small(half.read())
                    for half in (picture.control, picture.content)
                    if half is not None
                ]
                parts = [
                    {"text": caption + "\n", "learnt": False}
                    for caption in picture.captions[:EXAMPLES]
                ]
                times = f", {picture.repeats} times an epoch" if picture.repeats > 1 else ""
                shown.append(
                    {
                        "which": f"{Path(picture.where).name}{times}",
                        "parts": parts,
                        "pictures": pictures,
                    }
                )
        return shown


def gather(images: ImagesSection, *, seed: int, pairs: bool = False) -> Gathered:
    """Training and evaluation pictures. `pairs`: each with the picture before the edit. Raises
    UsageError naming every one that cannot be paired.
    """
    from ...data.rows import epoch_order

    made = Gathered([], [], BadPictures(skip=images.on_bad_row == "skip"), pairs=pairs)
    train = with_trained_captions(
        _masked(_found(images, "train", made)[: images.limit], images, made), images, seed=seed
    )
    regularisation = _found(images, "regularisation", made)
    given = _found(images, "eval", made) if images.eval is not None else None
    made.bad.settle(len(train) + len(regularisation) + len(given or ()))
    if given is None:
        held = min(
            len(train) - 1, round(images.eval_split * len(train)) or (1 if images.eval_split else 0)
        )
        chosen = set(epoch_order(len(train), seed=seed, epoch=0, shuffle=True)[:held])
        train, given = (
            [p for i, p in enumerate(train) if i not in chosen],
            [p for i, p in enumerate(train) if i in chosen],
        )
    train, regularisation, evaluated = map(
        _at_each, (train, regularisation, [replace(picture, repeats=1) for picture in given])
    )
    if any(source.draw is not None for source in picture_sources(images, "regularisation")):
        train, regularisation = one_to_one(train, regularisation)
    made.train = [*train, *regularisation]
    made.eval = evaluated
    made.regularisation = len(regularisation)
    return made


def _at_each(pictures: Iterable[Picture]) -> list[Picture]:
    """Each once for each of its resolutions."""
    return [
        replace(picture, resolutions=picture.resolutions[i : i + 1])
        for picture in pictures
        for i in range(len(picture.resolutions) or 1)
    ]


def _found(images: ImagesSection, side: str, made: Gathered) -> list[Picture]:
    found: list[Picture] = []
    for source in picture_sources(images, side):
        bad = len(made.bad.rows)
        if source.draw is not None:
            here, missing = class_pictures(source, pairs=made.pairs)
            made.to_draw += missing
        else:
            here = list(_of_source(source, images, made))
        if made.pairs:
            here = _paired(here, source, made.bad.add)
        if not here and len(made.bad.rows) == bad and images.uncaptioned != "skip":
            raise UsageError(
                f"{source.key}: {source.name}: no pictures there ({' '.join(PICTURE_SUFFIXES)})"
            )
        _note_disagreeing(here, made)
        settings = {
            "repeats": source.repeats,
            "weight": source.weight,
            "resolutions": source.resolution,
        }
        found += [replace(picture, **settings) for picture in here]  # type: ignore[arg-type]  # each is of its field's type
    return found


def _of_source(source: PictureSource, images: ImagesSection, made: Gathered) -> Iterable[Picture]:
    path = Path(source.name).expanduser()
    if not path.exists():
        raise UsageError(f"{source.key}: {source.name}: no such file or folder")
    if path.is_file():
        if source.caption is not None:
            raise UsageError(
                f"{source.key}.caption: has no effect: {source.name} has captions of its own; only"
                " a folder takes one"
            )
        if ending(path) not in ROW_ENDINGS:
            raise UsageError(
                f"{source.key}: {source.name}: expected a folder of pictures, or a file that ends"
                f" in {' '.join(ROW_ENDINGS)}"
            )
        return pictures_of_rows(path, source.columns, source.key, made.bad.add, pairs=made.pairs)
    files = _files_of_source(path, images)
    has_own_caption = source.caption is not None or images.captions == "names"
    metadata = None if has_own_caption else metadata_of(path)
    captions = [file for file in files if file.suffix in CAPTIONS]
    taken = [] if has_own_caption else [*captions, *([metadata] if metadata else [])]
    if others := count_other_files(files, taken):
        made.other_files[source.name] = others
    if has_own_caption:
        unreadable_among(files, made.bad.add)
        return [
            Picture(
                InFile(file),
                (caption_of_name(file) if source.caption is None else source.caption,),
                str(file),
            )
            for file in pictures_among(files)
        ]
    if metadata is not None:
        return _by_metadata(files, metadata, source, made)
    return pictures_beside_captions(files, made.bad.add, uncaptioned=images.uncaptioned)


def _files_of_source(folder: Path, images: ImagesSection) -> list[Path]:
    """The files of a folder and below, but for those of `images.masks` where that lies in it."""
    files = files_of(folder)
    if images.masks is None:
        return files
    masks = Path(images.masks).expanduser().resolve()
    if not masks.is_relative_to(folder.resolve()) or masks == folder.resolve():
        return files
    return [path for path in files if not path.resolve().is_relative_to(masks)]


def _by_metadata(
    files: list[Path], file: Path, source: PictureSource, made: Gathered
) -> Iterable[Picture]:
    """The pictures that the folder's metadata file names; of pairs, whose controls lie among them,
    the rows as they are. A picture that it does not name has no caption.
    """
    rows = list(pictures_of_rows(file, source.columns, source.key, made.bad.add, pairs=made.pairs))
    named = {
        content.path: row
        for row in rows
        for content in (row.content, row.control)
        if isinstance(content, InFile)
    }
    unreadable_among(files, made.bad.add)
    for path in pictures_among(files):
        beside = path.with_suffix(".txt")
        if path not in named:
            made.bad.add(str(path), f"no caption: {file.name} does not name it")
        elif made.pairs:
            continue
        elif (
            beside.is_file()
            and beside.read_bytes().decode("utf-8", "replace").split()
            != " ".join(named[path].captions).split()
        ):
            made.bad.add(str(path), f"{file.name} and {beside.name} disagree: remove one")
        else:
            yield named[path]
    if made.pairs:
        yield from rows


def _note_disagreeing(pictures: Iterable[Picture], made: Gathered) -> None:
    """Pictures that another source gives other captions are bad."""
    for picture in pictures:
        if not isinstance(picture.content, InFile):
            continue
        name = (str(picture.content.path.resolve()), picture.control)
        where, captions = made._captions_of.setdefault(name, (picture.where, picture.captions))
        if captions != picture.captions:
            made.bad.add(
                picture.where,
                f"{where} gives {picture.content.path.name} another caption ({captions[0]!r:.60})",
            )


def _masked(pictures: list[Picture], images: ImagesSection, made: Gathered) -> list[Picture]:
    """Pictures with the masks of `images.masks`."""
    if images.masks is None:
        return pictures
    folder = Path(images.masks).expanduser()
    if not folder.is_dir():
        raise UsageError(f"images.masks: {images.masks}: no such folder")
    masks = named_in(folder)
    roots = [Path(source.name).expanduser() for source in picture_sources(images, "train")]
    taken = set()
    out = []
    for picture in pictures:
        name = _name_of(picture, roots)
        taken.add(name)
        out.append(
            replace(picture, mask=InFile(masks[name]))
            if name in masks and picture.mask is None
            else picture
        )
    for name, path in masks.items() if not images.limit else ():
        if name not in taken:
            made.bad.add(str(path), "a mask without a picture")
    return out


def _paired(
    pictures: Sequence[Picture], source: PictureSource, complain: Complain
) -> list[Picture]:
    """The edited pictures that have one before the edit: their row's, or the one of the same name
    in the source's `controls`.
    """
    root = Path(source.name).expanduser()
    controls = dict[str, Path]()
    there = "a row names it (control), or images.controls its folder"
    if source.controls is not None:
        folder = Path(source.controls).expanduser()
        if not folder.is_dir():
            raise UsageError(f"{source.key}: controls: {source.controls}: no such folder")
        if folder.resolve().is_relative_to(root.resolve()):
            raise UsageError(
                f"{source.key}: controls: {source.controls} lies in {source.name}, which holds the"
                " edited ones",
                fix="move it",
            )
        controls, there = named_in(folder), f"{source.controls} has none of its name"
    paired = []
    for picture in pictures:
        name = _name_of(picture, [root])
        if picture.control is None and name in controls:
            picture = replace(picture, control=InFile(controls[name]))
        if picture.control is None:
            complain(picture.where, f"no picture before the edit: {there}")
        else:
            paired.append(picture)
    return paired


def _name_of(picture: Picture, roots: Sequence[Path]) -> str:
    """The picture's path without suffix, relative to its source's folder."""
    if not isinstance(picture.content, InFile):
        return ""
    path = picture.content.path
    for root in roots:
        folder = root if root.is_dir() else root.parent
        if path.is_relative_to(folder):
            return path.relative_to(folder).with_suffix("").as_posix()
    return path.stem


MOST_SKIPPED = 0.05  # of the pictures; more means that the data as a whole is wrong


class BadPictures:
    """The bad ones of a run, each place once, in the order in which they were found.

    skip  `images.on_bad_row: skip`
    """

    def __init__(self, *, skip: bool) -> None:
        self.skip = skip
        self.rows: dict[str, BadRow] = {}

    def add(self, place: str, reason: str) -> None:
        self.rows.setdefault(place, BadRow(place, reason))

    def settle(self, good: int, *, fix: str | None = None) -> None:
        """Raises UsageError naming them, unless they may be left out.

        good  number of pictures that can be used
        fix   the fix of the error; that `skip` would leave them out is added where it would
        """
        if not self.rows:
            return
        share = len(self.rows) / (len(self.rows) + good)
        if self.skip and share <= MOST_SKIPPED:
            return
        rows = list(self.rows.values())
        lines = [f"{row.place}: {row.reason}" for row in rows[:PLACES]]
        if len(rows) > PLACES:
            lines.append(f"and {len(rows) - PLACES:,} more")
        if self.skip:
            lines.insert(
                0,
                f"images.on_bad_row: skip leaves out at most {MOST_SKIPPED:.0%} of the pictures,"
                f" and these are {share:.0%}",
            )
        offered = [fix] if fix else []
        if not self.skip and share <= MOST_SKIPPED:
            offered.append(
                f"images.on_bad_row: skip leaves them out and lists them in the run's {FILE}"
            )
        raise UsageError("\n".join(lines), fix="; or ".join(offered) or "mend or remove these")


# --- captions: a trigger word, tags in other orders, tags left out. Text is encoded once, before
# training, so that a caption's random forms are drawn then, so many of each, of which one is taken
# each time the picture is seen; they depend on the seed and the caption only

SEPARATOR = ","


def with_trained_captions(
    pictures: Sequence[Picture], images: ImagesSection, *, seed: int
) -> list[Picture]:
    """The pictures with the captions that are learnt. Raises UsageError for tags that no caption
    separates.
    """
    wants_tags = images.tag_orders is not None
    if not wants_tags:
        for key, given in (("keep_tags", images.keep_tags), ("tag_dropout", images.tag_dropout)):
            if given:
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
        replace(picture, captions=_forms(picture.captions, images, seed=seed))
        for picture in pictures
    ]


def _forms(captions: Sequence[str], images: ImagesSection, *, seed: int) -> tuple[str, ...]:
    made = [
        form
        for caption in captions
        for form in (
            [caption] if images.tag_orders is None else _orders(caption, images, seed=seed)
        )
    ]
    if images.trigger:
        made = [f"{images.trigger}{SEPARATOR} {form}" if form else images.trigger for form in made]
    return tuple(made)


def _orders(caption: str, images: ImagesSection, *, seed: int) -> list[str]:
    """`images.tag_orders` forms of a caption; the same form may come twice, as it would when drawn
    anew each time.
    """
    tags = [tag.strip() for tag in caption.split(SEPARATOR) if tag.strip()]
    kept = tags[: images.keep_tags]
    rest = tags[images.keep_tags :]
    digest = hashlib.sha256(f"tags:{seed}:{caption}".encode()).digest()
    draw = random.Random(int.from_bytes(digest[:8], "big"))
    forms = []
    for _ in range(images.tag_orders or 1):
        some = [tag for tag in rest if draw.random() >= images.tag_dropout]
        draw.shuffle(some)
        forms.append(f"{SEPARATOR} ".join([*kept, *some]))
    return forms


def caption_of_name(path: Path) -> str:
    """`red_circle-2.png`: red circle 2"""
    return " ".join(path.stem.replace("_", " ").replace("-", " ").split())


# --- class pictures for prior preservation: what the base model draws for the class's caption,
# trained on beside the subject's pictures, so that the class stays what it was (Ruiz et al. 2023,
# "DreamBooth"). They are drawn once, before training, into a folder that later runs find

RECORD = "drawn.json"


@dataclass(frozen=True)
class ToDraw:
    """number  from 1 in its folder; with the run's seed it decides the noise
    size    its side in pixels; None: the run's
    """

    path: Path
    caption: str
    number: int
    size: int | None


def class_pictures(
    source: PictureSource, *, pairs: bool = False
) -> tuple[list[Picture], list[ToDraw]]:
    """The pictures of a source with `draw`, the first of those in its folder and the missing ones;
    and the missing ones alone.

    pairs   of a model that edits: class pictures have none before the edit
    Raises  UsageError for these, and for a file in the folder's place
    """
    if pairs:
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
    there = pictures_among(files_of(folder))[: source.draw] if folder.is_dir() else []
    free = (
        (number, path)
        for number in count(1)
        if (path := folder / f"drawn_{number:04}.png") not in there
    )
    size = max(source.resolution, default=None)
    missing = [
        ToDraw(path, caption, number, size)
        for (number, path), _ in zip(free, range((source.draw or 0) - len(there)))
    ]
    # the order that the next run finds them in
    paths = sorted([*there, *(one.path for one in missing)])
    return [Picture(InFile(path), (caption,), str(path)) for path in paths], missing


def one_to_one(
    train: Sequence[Picture], classes: Sequence[Picture]
) -> tuple[list[Picture], list[Picture]]:
    """Both with as many rows in an epoch as the one that has more; the pictures of the other come
    again in turn.
    """
    most = max(sum(picture.repeats for picture in some) for some in (train, classes))
    return _cycled(train, most), _cycled(classes, most)


def _cycled(pictures: Sequence[Picture], rows: int) -> list[Picture]:
    each = [i for i, picture in enumerate(pictures) for _ in range(picture.repeats)]
    times = Counter(each[k % len(each)] for k in range(rows)) if each else Counter[int]()
    return [replace(picture, repeats=times[i]) for i, picture in enumerate(pictures)]


def refuse_other(
    sources: Sequence[PictureSource], todo: Sequence[ToDraw], facts: dict[str, Any]
) -> None:
    """Raises  UsageError for a folder whose pictures were drawn from another caption or by another
               model; where some of them are still to
    be drawn, also for one with others of the `facts`
    """
    lacking = {one.path.parent for one in todo}
    for source in sources:
        folder = Path(source.name).expanduser()
        if source.draw is None:
            continue
        try:
            before = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        for key, now in {"caption": source.caption, **facts}.items():
            compared = (
                isinstance(before, dict)
                and key in before
                and (folder in lacking or key in ("caption", "model"))
            )
            if compared and before[key] != now:
                raise UsageError(
                    f"images.regularisation: {folder}: its class pictures were drawn with {key}"
                    f" {before[key]!r}, not {now!r}",
                    fix=f"another folder; to go on with both: remove {RECORD} there",
                )


def write_missing(todo: Sequence[ToDraw], facts: dict[str, Any], drawn: Iterator[bytes]) -> None:
    """Writes the pictures that are not there, a whole file each, so that a run that is stopped
    meanwhile goes on with the next one.

    facts  what they were drawn with, kept beside them
    drawn  the PNG of each, in order, as it is drawn
    """
    for folder, caption in {one.path.parent: one.caption for one in todo}.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RECORD).write_text(
            json.dumps({"caption": caption, **facts}, indent=1) + "\n", encoding="utf-8"
        )
    for one, png in zip(watched(todo, "drawing class pictures"), drawn):
        unfinished = one.path.with_suffix(".part")
        unfinished.write_bytes(png)
        os.replace(unfinished, one.path)
