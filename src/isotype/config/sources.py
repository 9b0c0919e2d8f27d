"""`data.*` and `images.*` as sources: names, or mappings with settings of their own. Imports no
torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from ..errors import UsageError
from .schema import DataSection, ImagesSection, RunConfig

STDLIB = "stdlib"
HUB = "hf:"
FORMATS: tuple[str, ...] = get_args(DataSection.model_fields["format"].annotation)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """One entry of data.train or data.eval, as a user gave it.

    group    the name of the evaluation set that it belongs to
    weight   share of the training rows that come from here, relative to the other sources; None:
             every row once
    subset   configuration of a hub dataset, with `split` and `revision`; a folder of `save_to_disk`
             has a `split` too
    """

    name: str
    group: str = ""
    weight: float | None = None
    format: str = "auto"
    columns: Mapping[str, str | None] | None = None
    limit: int | None = None
    subset: str | None = None
    split: str = "train"
    revision: str | None = None


_KEYS = tuple(field.name for field in fields(SourceSpec) if field.name != "group")
_HUB_ONLY = ("subset", "split", "revision")
SPLITS = "dataset_dict.json"  # in a folder of `save_to_disk` that has several splits


def entries_of(given: Any, key: str, *, wanted: str) -> list[tuple[str, dict[str, Any]]]:
    """(where, settings) of each entry of a list of sources: a name is the entry with that name
    alone.

    Raises  UsageError for an empty list, naming what is `wanted`
    """
    entries = [given] if isinstance(given, str) else list(given)
    if not entries:
        raise UsageError(f"{key}: give at least one {wanted}")
    if isinstance(given, str):
        places = [key]
    else:
        places = [f"{key}[{i}]" for i in range(len(entries))]
    return [
        (where, {"name": entry} if isinstance(entry, str) else dict(entry))
        for where, entry in zip(places, entries)
    ]


def unknown_key(where: str, key: str, keys: Sequence[str]) -> UsageError:
    """The error for a key that an entry does not have, with the one that was probably meant."""
    near = get_close_matches(key, keys, n=1)
    return UsageError(
        f"{where}.{key}: unknown key"
        + (f", did you mean {near[0]}?" if near else f"; there are {' '.join(keys)}")
    )


def source_specs(data: DataSection, side: str) -> list[SourceSpec]:
    """The sources of `data.train` or `data.eval`, with what the section sets for all of them.

    side    `train` or `eval`
    Raises  UsageError naming the entry and the key
    """
    given = getattr(data, side)
    key = f"data.{side}"
    if given is None:
        return []
    groups: Mapping[str, Any] = {"": given}
    if isinstance(given, Mapping):
        _check_groups(given, key)
        groups = given
    specs = [
        _spec(settings, where, data, group)
        for group, value in groups.items()
        for where, settings in entries_of(
            value, f"{key}.{group}" if group else key, wanted="file, or stdlib"
        )
    ]
    seen: set[tuple[Any, ...]] = set()
    for spec in specs:
        if spec.name.startswith(HUB) or spec.name == STDLIB:
            own = spec.name
        else:
            own = os.path.abspath(os.path.expanduser(spec.name))
        what = (own, spec.subset, spec.split, spec.revision)
        if what in seen:
            raise UsageError(
                f"{key}: {spec.name} is named twice; a weight makes its rows come more often"
            )
        seen.add(what)
    if side == "eval" and any(spec.weight is not None for spec in specs):
        raise UsageError(f"{key}: weight has no effect: evaluation takes every row once")
    if len(specs) == 1 and specs[0].weight is not None:
        raise UsageError(f"{key}: weight has no effect with one source")
    return specs


def _check_groups(given: Mapping[str, Any], key: str) -> None:
    """Raises  UsageError for evaluation sets whose names or values are none"""
    if not given:
        raise UsageError(f"{key}: give at least one file, or stdlib")
    if "name" in given and given.keys() <= set(_KEYS):
        raise UsageError(
            f"{key}: a source with settings is an entry of a list",
            fix=f"{key}: [{{name: {given['name']}, ...}}]",
        )
    for name in given:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            raise UsageError(
                f"{key}: {name!r}: a set's name has letters, digits, _ . and - only: it names the"
                " metric eval_loss_NAME"
            )


def is_folder_name(model: str) -> bool:
    """Whether a model's name can only be a folder, or a file: the hub's have at most one slash."""
    return (
        model.startswith((".", "/", "~"))
        or model.count("/") > 1
        or model.endswith((".safetensors", ".gguf"))
    )


def gguf_file(name: str) -> Path | None:
    """The file that a model's name means: itself, or the one in a folder that has no config.json.
    Raises UsageError for several.
    """
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    there = sorted(path.glob("*.gguf"))
    if len(there) > 1:
        raise UsageError(
            f"model {name}: {len(there)} GGUF files, and a model is one", fix=f"--model {there[0]}"
        )
    return there[0] if there else None


def config_file(given: str) -> Path:
    """The JSON file that `model.config` names, itself or by its folder."""
    path = Path(given)
    return path / "config.json" if path.is_dir() else path


def near_model(name: str) -> str:
    """`, did you mean DIR/base?` where a model's folder of nearly that name lies, else nothing."""
    try:
        path = Path(name).expanduser()
        models = [p.name for p in path.parent.iterdir() if (p / "config.json").is_file()]
    # ValueError: a NUL in the name; RuntimeError: ~ of an unknown user
    except (OSError, ValueError, RuntimeError):
        return ""
    near = get_close_matches(path.name, models, n=1)
    return f", did you mean {path.parent / near[0]}?" if near else ""


def where_looked(name: str, beside: Path | None = None) -> str:
    """What helps with a folder's relative name that is not there: where it was looked for, and
    where it lies instead.

    beside  the configuration's file, whose folder may be the one that was meant
    """
    path = Path(name).expanduser()
    if path.is_absolute():
        return ""
    meant = None if beside is None else beside.parent / path
    if meant is not None and meant.is_dir():
        return (
            f"; relative names begin in the working directory, {Path.cwd()}, not at the file; it is"
            f" {meant}"
        )
    return (
        f"; it was looked for as {Path.cwd() / path}: relative names begin in the working directory"
    )


def check_data(config: RunConfig, sources: Mapping[str, str]) -> None:
    """Checks the data section before any data is read. Raises UsageError.

    sources  every key -> where it was set; `default` where it was not
    """
    data = config.data
    for side in ("train", "eval"):
        source_specs(data, side)
    stop_on = config.train.stop_on
    sets = list(data.eval) if isinstance(data.eval, dict) else []
    if stop_on is not None and stop_on not in sets:
        there = f"data.eval names {', '.join(sets)}" if sets else "data.eval names no sets"
        raise UsageError(
            f"{sources['train.stop_on']} train.stop_on: {stop_on}: {there}",
            fix=f"data.eval: {{{stop_on}: FILE, ...}}" if not sets else None,
        )
    if data.stream and config.train.steps is None:
        raise UsageError(
            "data.stream needs train.steps: how many rows a stream has is not known",
            fix="--steps N",
        )
    if data.stream and data.cache not in ("auto", "none"):
        raise UsageError(
            f"{sources['data.cache']} data.cache: has no effect with data.stream: its rows are"
            " tokenised each time"
        )
    if (
        not data.stream
        and sources.get("data.shuffle_buffer", "default") != "default"
        and data.shuffle_buffer != 4096
    ):
        raise UsageError(
            f"{sources['data.shuffle_buffer']} data.shuffle_buffer: has no effect without"
            " data.stream: all rows are shuffled"
        )


def _refuse_no_whole_number(where: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{where}: expected a whole number of at least 1, got {value!r}")


def _has_splits(name: str) -> bool:
    try:
        return (Path(name).expanduser() / SPLITS).is_file()
    except RuntimeError:  # ~ of an unknown user
        return False


def _checked(
    settings: dict[str, Any], where: str, keys: Sequence[str], wanted: str
) -> dict[str, Any]:
    """What kinds of entries share: known keys, a name, a weight, columns. Raises UsageError."""
    for key in settings:
        if key not in keys:
            raise unknown_key(where, key, keys)
    settings = {key: value for key, value in settings.items() if value is not None}
    name = settings.get("name")
    weight = settings.get("weight")
    columns = settings.get("columns")
    if not isinstance(name, str) or not name.strip():
        raise UsageError(f"{where}.name: expected {wanted}, got {name!r}")
    if weight is not None and (
        isinstance(weight, bool)
        or not isinstance(weight, int | float)
        or not 0 < weight < float("inf")
    ):
        raise UsageError(f"{where}.weight: expected a number above 0, got {weight!r}")
    if columns is not None and not _is_columns(columns, may_drop="format" in keys):
        raise UsageError(
            f"{where}.columns: expected a mapping of our keys to the data's, as {{ours: theirs}},"
            f" got {columns!r}"
        )
    return settings | ({} if weight is None else {"weight": float(weight)})


def _is_columns(columns: Any, *, may_drop: bool) -> bool:
    """Whether it maps keys to the data's names; with `may_drop` also to null, for keys not read."""
    allowed = (str, type(None)) if may_drop else (str,)
    return isinstance(columns, dict) and all(
        isinstance(value, allowed) for value in columns.values()
    )


def _spec(settings: dict[str, Any], where: str, data: DataSection, group: str) -> SourceSpec:
    own = {"columns": data.columns, "format": data.format} | {
        key: value for key, value in settings.items() if value is not None
    }
    settings = _checked(own, where, _KEYS, "a file, folder, glob, hf:NAME or stdlib")
    name = settings["name"]
    form = settings["format"]
    limit = settings.get("limit")
    for key in _HUB_ONLY:
        if key in settings and not isinstance(settings[key], str):
            raise UsageError(f"{where}.{key}: expected text, got {settings[key]!r}")
        if (
            key in settings
            and not name.startswith(HUB)
            and not (key == "split" and _has_splits(name))
        ):
            if key == "split":
                or_folder = ", nor a folder of save_to_disk with several splits"
            else:
                or_folder = ""
            fix = (
                "rows are not chosen by a column: write each split to a file of its own, for"
                " data.train and data.eval"
            )
            said = (
                f"{where}.{key}: has no effect: {name} is no dataset of the hub"
                f" (hf:NAME){or_folder}"
            )
            raise UsageError(said, fix=fix if key == "split" and Path(name).suffix else None)
    if limit is not None:
        _refuse_no_whole_number(f"{where}.limit", limit)
    if form not in FORMATS:
        near = get_close_matches(str(form), FORMATS, n=1)
        meant = f", did you mean {near[0]}?" if near else f": one of {' '.join(FORMATS)}"
        raise UsageError(f"{where}.format: unknown format {form!r}{meant}")
    limits = [n for n in (limit, data.limit) if n is not None]
    return SourceSpec(**settings | {"group": group, "limit": min(limits) if limits else None})


def names(given: Any) -> list[str]:
    """The names of the sources of `data.train` or `data.eval`, for all forms in which they can be
    given, also from a damaged file.
    """
    if isinstance(given, dict) and "name" not in given:  # evaluation sets
        return [name for value in given.values() for name in names(value)]
    entries = given if isinstance(given, list) else [] if given is None else [given]
    return [str(entry.get("name", "?") if isinstance(entry, dict) else entry) for entry in entries]


def short_names(given: Any) -> str:
    """`chats.jsonl, share.jsonl`: without their folders, for a line."""
    return ", ".join(name.rstrip("/").rpartition("/")[2] or name for name in names(given))


def first_name(given: Any) -> str:
    """The part of a run's name that comes from its data: the first source."""
    return next(iter(names(given)), "data").removeprefix(HUB)


COLUMNS = ("image", "text", "mask", "control")


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureSource:
    """One entry of images.train, images.eval or images.regularisation, as a user gave it.

    caption     of every picture, instead of those in text files
    repeats     how often each picture comes in an epoch
    weight      of the loss of its pictures; of regularisation pictures only
    draw        how many pictures the folder shall have, where the base model draws those that it
                lacks; of regularisation pictures only
    resolution  in place of `images.resolution`; with several each picture comes once in each
    controls    folder of the pictures before the edit
    """

    name: str
    key: str
    caption: str | None = None
    repeats: int = 1
    weight: float = 1.0
    draw: int | None = None
    resolution: tuple[int, ...] = ()
    columns: Mapping[str, str] | None = None
    controls: str | None = None


_PICTURE_KEYS = {
    "train": ("name", "caption", "columns", "repeats", "controls", "resolution"),
    "eval": ("name", "caption", "columns", "controls", "resolution"),
    "regularisation": (
        "name",
        "caption",
        "columns",
        "repeats",
        "weight",
        "draw",
        "controls",
        "resolution",
    ),
}


def picture_sources(images: ImagesSection, split: str) -> list[PictureSource]:
    """The sources of one side, with what the section sets for all of them.

    split   `train`, `eval` or `regularisation`
    Raises  UsageError naming the entry and the key
    """
    given = getattr(images, split)
    key = f"images.{split}"
    if given is None:
        return []
    found = [
        _source(settings, where, split, images)
        for where, settings in entries_of(given, key, wanted="folder or file")
    ]
    seen = set()
    for one in found:
        if one.name in seen:
            hint = "" if split == "eval" else "; repeats makes its pictures come more often"
            raise UsageError(f"{key}: {one.name} is named twice{hint}")
        seen.add(one.name)
    return found


def _source(
    settings: dict[str, Any], where: str, side: str, images: ImagesSection
) -> PictureSource:
    for key, why in {
        "weight": f"only images.regularisation has it: the pictures of images.{side} count in full",
        "draw": f"only images.regularisation has it: the pictures of images.{side} are your own",
        "repeats": "has no effect: evaluation takes every picture once",
    }.items():
        if settings.get(key) is not None and key not in _PICTURE_KEYS[side]:
            raise UsageError(f"{where}.{key}: {why}")
    own = {"columns": images.columns, "controls": images.controls} | {
        key: value for key, value in settings.items() if value is not None
    }
    settings = _checked(own, where, _PICTURE_KEYS[side], "a folder or a file")
    caption = settings.get("caption")
    given = settings.pop("resolution", None)
    if isinstance(given, list):
        resolution = tuple(given)
    elif given is None:
        resolution = ()
    else:
        resolution = (given,)
    numbers = [
        ("repeats", settings.get("repeats", 1)),
        ("draw", settings.get("draw", 1)),
        *(("resolution", r) for r in resolution),
    ]
    for key, number in numbers:
        _refuse_no_whole_number(f"{where}.{key}", number)
    if "draw" in settings and not caption:
        raise UsageError(
            f"{where}.draw: needs caption, the prompt that the pictures are drawn from",
            fix="caption: a photo of a person",
        )
    if "draw" in settings and "repeats" in settings:
        raise UsageError(
            f"{where}.repeats: has no effect with draw: class pictures come one to one with the"
            " others"
        )
    for text in ("caption", "controls"):
        if not isinstance(settings.get(text, ""), str):
            raise UsageError(f"{where}.{text}: expected text, got {settings[text]!r}")
    if unknown := next((key for key in settings.get("columns") or () if key not in COLUMNS), None):
        raise UsageError(f"{where}.columns: unknown key {unknown!r}: expected {', '.join(COLUMNS)}")
    return PictureSource(key=where, resolution=tuple(dict.fromkeys(resolution)), **settings)
