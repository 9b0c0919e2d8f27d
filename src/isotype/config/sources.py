"""Reads the sources of data and pictures that `data.train`, `data.eval` and the keys of `images`
list: names, or mappings with settings. Imports no torch.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from ..errors import UsageError
from .schema import DataSection, ImagesSection, RunConfig

STDLIB = "stdlib"
HUB_PREFIX = "hf:"
FORMATS: tuple[str, ...] = get_args(DataSection.model_fields["format"].annotation)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """One entry of data.train or data.eval, as the user wrote it.

    group    the name of the evaluation set that the source belongs to
    weight   share of the training rows that come from this source, relative to the other sources;
             None means that every row is used once
    subset   configuration of a hub dataset; `subset`, `split` and `revision` apply to hub datasets,
             and `split` also to a folder that `save_to_disk` wrote
    """

    name: str
    group: str = ""
    weight: float | None = None
    format: str = "auto"
    columns: Mapping[str, str | None] | None = None
    roles: Mapping[str, str] | None = None
    limit: int | None = None
    subset: str | None = None
    split: str = "train"
    revision: str | None = None


_SOURCE_KEYS = tuple(field.name for field in fields(SourceSpec) if field.name != "group")
_HUB_KEYS = ("subset", "split", "revision")  # keys of a source that only a dataset of the hub has
SPLITS_FILE = "dataset_dict.json"  # lies in a folder of `save_to_disk` with several splits


def list_entries(value: Any, key: str, *, description: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns (key with its position, settings) for each entry of a list of sources. An entry that
    is only a name gives the settings `{name: NAME}`.

    Raises  UsageError for an empty list; the message uses `description` to say what the list must
            contain
    """
    entries = [value] if isinstance(value, str) else list(value)
    if not entries:
        raise UsageError(f"{key}: give at least one {description}")
    if isinstance(value, str):
        locations = [key]
    else:
        locations = [f"{key}[{i}]" for i in range(len(entries))]
    return [
        (location, {"name": entry} if isinstance(entry, str) else dict(entry))
        for location, entry in zip(locations, entries)
    ]


def unknown_key(location: str, key: str, keys: Sequence[str]) -> UsageError:
    """Returns the error for an unknown key of an entry, with the most similar known key."""
    near = get_close_matches(key, keys, n=1)
    hint = f", did you mean {near[0]}?" if near else f"; there are {' '.join(keys)}"
    return UsageError(f"{location}.{key}: unknown key{hint}")


def source_specs(data: DataSection, split: str) -> list[SourceSpec]:
    """Returns the sources of `data.train` or `data.eval`. The section's `format`, `columns` and
    `limit` apply to each of them.

    split   `train` or `eval`
    Raises  UsageError naming the entry and the key
    """
    value = getattr(data, split)
    key = f"data.{split}"
    if value is None:
        return []
    groups: Mapping[str, Any] = {"": value}
    if isinstance(value, Mapping):
        _check_groups(value, key)
        groups = value
    specs = [
        _build_spec(settings, location, data, group)
        for group, value in groups.items()
        for location, settings in list_entries(
            value, f"{key}.{group}" if group else key, description="file, or stdlib"
        )
    ]
    identities: set[tuple[Any, ...]] = set()
    for spec in specs:
        if spec.name.startswith(HUB_PREFIX) or spec.name == STDLIB:
            name = spec.name
        else:
            name = os.path.abspath(os.path.expanduser(spec.name))
        identity = (name, spec.subset, spec.split, spec.revision)
        if identity in identities:
            raise UsageError(
                f"{key}: {spec.name} is named twice; a weight makes its rows come more often"
            )
        identities.add(identity)
    if split == "eval" and any(spec.weight is not None for spec in specs):
        raise UsageError(f"{key}: weight has no effect: evaluation takes every row once")
    if len(specs) == 1 and specs[0].weight is not None:
        raise UsageError(f"{key}: weight has no effect with one source")
    return specs


def _check_groups(groups: Mapping[str, Any], key: str) -> None:
    """Raises UsageError for evaluation sets with an invalid name, and for an empty mapping"""
    if not groups:
        raise UsageError(f"{key}: give at least one file, or stdlib")
    if "name" in groups and groups.keys() <= set(_SOURCE_KEYS):
        raise UsageError(
            f"{key}: a source with settings is an entry of a list",
            fix=f"{key}: [{{name: {groups['name']}, ...}}]",
        )
    for name in groups:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            raise UsageError(
                f"{key}: {name!r}: a set's name has letters, digits, _ . and - only: it names the"
                " metric eval_loss_NAME"
            )


def is_folder_name(model: str) -> bool:
    """Returns True if a model's name can only be a path. The names of hub repositories have at most
    one slash.
    """
    return (
        model.startswith((".", "/", "~"))
        or model.count("/") > 1
        or model.endswith((".safetensors", ".gguf"))
    )


def gguf_file(name: str) -> Path | None:
    """Returns the GGUF file that a model's name means: the file itself, or the only GGUF file in a
    folder without a config.json. Raises UsageError for a folder with several GGUF files.
    """
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise UsageError(
            f"model {name}: {len(files)} GGUF files, and a model is one", fix=f"--model {files[0]}"
        )
    return files[0] if files else None


def config_file(name: str) -> Path:
    """Returns the JSON file of `model.config`, which names the file or its folder."""
    path = Path(name)
    return path / "config.json" if path.is_dir() else path


LFS_MARK = b"version https://git-lfs.github.com/spec/"


def is_lfs_pointer(path: Path) -> bool:
    """Returns True if a file only contains the text that Git LFS puts in place of a large file that
    was not fetched.
    """
    try:
        with path.open("rb") as file:
            return file.read(len(LFS_MARK)) == LFS_MARK
    except OSError:
        return False


def lfs_fix(path: Path) -> str:
    """Returns the command that fetches the content of the Git LFS pointers in a folder."""
    return f"git -C {shlex.quote(str(path.parent))} lfs pull"


# key that names a folder -> what this folder holds
_EXPECTED_FOLDERS = {
    "model.name": "a model",
    "model.tokenizer": "a tokenizer",
    "distil.teacher": "a model",
    "adapter.start_from": "a PEFT adapter",
}
_DATA_SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet")


def model_folder_problem(key: str, name: str) -> str | None:
    """Returns a message for a local model that is a run, an adapter or a data file, or whose files
    are Git LFS pointers: the problem, and how to fix it. Returns None for any other name. The key
    may also be `model.tokenizer`, `distil.teacher` or `adapter.start_from`.
    """
    path = Path(name).expanduser()
    if path.is_file() and path.suffix in _DATA_SUFFIXES:
        return f"is a file of data, expected the folder of {_EXPECTED_FOLDERS[key]}"
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
    except OSError:
        return None
    names = [file.name for file in files]
    if "config.json" not in names and "resolved.yaml" in names:
        return f"is the folder of a run; {_use_of_run(key, path)}"
    if "adapter_config.json" in names and "config.json" not in names:
        if key in ("model.tokenizer", "adapter.start_from"):
            return None
        return f"is a PEFT adapter, expected a model; {_use_of_adapter(key, path, name)}"
    pointers = [file for file in files if is_lfs_pointer(file)]
    if pointers:
        return (
            f"{pointers[0].name} is a Git LFS pointer, without the content; {lfs_fix(pointers[0])}"
        )
    return None


def _use_of_run(key: str, run: Path) -> str:
    """Returns what to write for `key` to use the result of a run."""
    adapter, model = run / "adapter", run / "model"
    if (model / "config.json").is_file():
        if key == "adapter.start_from":
            return f"it trained a whole model; write model.name: {model}"
        return f"write {key}: {model}"
    if not (adapter / "adapter_config.json").is_file():
        return f"it has no result yet; isotype train --resume {run} continues it"
    if key in ("model.tokenizer", "adapter.start_from"):
        return f"write {key}: {adapter}"
    return _use_of_adapter(key, adapter, str(run))


def _use_of_adapter(key: str, adapter: Path, merged_name: str) -> str:
    """Returns what to write for `key`, which expects a model, to use an adapter.

    merged_name  the folder that `isotype merge` is called with: the adapter, or its run
    """
    if key != "model.name":
        return f"make it a model: isotype merge {merged_name} --out MODEL, and write {key}: MODEL"
    return (
        f"write model.name: {_adapter_base(adapter / 'adapter_config.json')} and"
        f" adapter.start_from: {adapter} to train it further, or make it a model: isotype merge"
        f" {merged_name}"
    )


def _adapter_base(file: Path) -> str:
    """Returns the name of the base model in an adapter's configuration."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = None
    base = content.get("base_model_name_or_path") if isinstance(content, dict) else None
    return base if isinstance(base, str) else "BASE"


def closest_model_hint(name: str) -> str:
    """Returns `, did you mean DIR/base?` where a model's folder with a similar name exists, else an
    empty text.
    """
    try:
        path = Path(name).expanduser()
        models = [file.name for file in path.parent.iterdir() if (file / "config.json").is_file()]
    # a name with a NUL raises ValueError, and ~ of an unknown user raises RuntimeError
    except (OSError, ValueError, RuntimeError):
        return ""
    near = get_close_matches(path.name, models, n=1)
    return f", did you mean {path.parent / near[0]}?" if near else ""


def missing_folder_hint(name: str, config_path: Path | None = None) -> str:
    """Returns a hint for a relative path to a missing folder: where it was searched, and where a
    folder of that name exists instead.

    config_path  the configuration's file; the path may have been meant relative to its folder
    """
    path = Path(name).expanduser()
    if path.is_absolute():
        return ""
    path_beside_config = None if config_path is None else config_path.parent / path
    if path_beside_config is not None and path_beside_config.is_dir():
        return (
            f"; relative names begin in the working directory, {Path.cwd()}, not at the file; it is"
            f" {path_beside_config}"
        )
    return (
        f"; it was looked for as {Path.cwd() / path}: relative names begin in the working directory"
    )


def check_data(config: RunConfig, sources: Mapping[str, str]) -> None:
    """Checks the data section before any data is read. Raises UsageError.

    sources  for every key the place where it was set, or `default`
    """
    data = config.data
    for split in ("train", "eval"):
        source_specs(data, split)
    stop_on = config.train.stop_on
    sets = list(data.eval) if isinstance(data.eval, dict) else []
    if stop_on is not None and stop_on not in sets:
        eval_sets = f"data.eval names {', '.join(sets)}" if sets else "data.eval names no sets"
        raise UsageError(
            f"{sources['train.stop_on']} train.stop_on: {stop_on}: {eval_sets}",
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


def _require_positive_integer(location: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{location}: expected a whole number of at least 1, got {value!r}")


def _has_splits(name: str) -> bool:
    try:
        return (Path(name).expanduser() / SPLITS_FILE).is_file()
    except RuntimeError:  # ~ of an unknown user
        return False


def _check_entry(
    settings: dict[str, Any], location: str, keys: Sequence[str], description: str
) -> dict[str, Any]:
    """Checks the keys that entries of text data and of pictures have in common: that all keys are
    known, and that `name`, `weight` and `columns` are valid. Raises UsageError.
    """
    for key in settings:
        if key not in keys:
            raise unknown_key(location, key, keys)
    settings = {key: value for key, value in settings.items() if value is not None}
    name = settings.get("name")
    weight = settings.get("weight")
    columns = settings.get("columns")
    if not isinstance(name, str) or not name.strip():
        raise UsageError(f"{location}.name: expected {description}, got {name!r}")
    if weight is not None and (
        isinstance(weight, bool)
        or not isinstance(weight, int | float)
        or not 0 < weight < float("inf")
    ):
        raise UsageError(f"{location}.weight: expected a number above 0, got {weight!r}")
    if columns is not None and not _is_column_mapping(columns, allow_null="format" in keys):
        raise UsageError(
            f"{location}.columns: expected a mapping of our keys to the data's, as {{ours: theirs}},"
            f" got {columns!r}"
        )
    return settings | ({} if weight is None else {"weight": float(weight)})


def _is_column_mapping(columns: Any, *, allow_null: bool) -> bool:
    """Returns True if `columns` is a mapping of keys to names in the data. With `allow_null` a name
    may also be null; the key is then not read from the data.
    """
    allowed = (str, type(None)) if allow_null else (str,)
    return isinstance(columns, dict) and all(
        isinstance(value, allowed) for value in columns.values()
    )


def _build_spec(
    settings: dict[str, Any], location: str, data: DataSection, group: str
) -> SourceSpec:
    merged = {"columns": data.columns, "roles": data.roles, "format": data.format} | {
        key: value for key, value in settings.items() if value is not None
    }
    settings = _check_entry(
        merged, location, _SOURCE_KEYS, "a file, folder, glob, hf:NAME or stdlib"
    )
    name = settings["name"]
    format_name = settings["format"]
    limit = settings.get("limit")
    for key in _HUB_KEYS:
        if key in settings and not isinstance(settings[key], str):
            raise UsageError(f"{location}.{key}: expected text, got {settings[key]!r}")
        if (
            key in settings
            and not name.startswith(HUB_PREFIX)
            and not (key == "split" and _has_splits(name))
        ):
            if key == "split":
                folder_hint = ", nor a folder of save_to_disk with several splits"
            else:
                folder_hint = ""
            fix = (
                "rows are not chosen by a column: write each split to a file of its own, for"
                " data.train and data.eval"
            )
            message = (
                f"{location}.{key}: has no effect: {name} is no dataset of the hub"
                f" (hf:NAME){folder_hint}"
            )
            raise UsageError(message, fix=fix if key == "split" and Path(name).suffix else None)
    if limit is not None:
        _require_positive_integer(f"{location}.limit", limit)
    if format_name not in FORMATS:
        near = get_close_matches(str(format_name), FORMATS, n=1)
        hint = f", did you mean {near[0]}?" if near else f": one of {' '.join(FORMATS)}"
        raise UsageError(f"{location}.format: unknown format {format_name!r}{hint}")
    limits = [n for n in (limit, data.limit) if n is not None]
    roles = _invert_roles(settings.get("roles"), location)
    limit = min(limits) if limits else None
    return SourceSpec(**settings | {"group": group, "limit": limit, "roles": roles})


# the roles of turns for which `data.roles` can name other words
ROLE_NAMES = ("system", "user", "assistant", "tool", "function_call", "developer")


def _invert_roles(roles: Any, location: str) -> dict[str, str] | None:
    """Returns a mapping of the role names in the data to Isotype's role names. Raises UsageError."""
    if not roles:
        return None
    if not isinstance(roles, dict):
        raise UsageError(
            f"{location}.roles: expected a mapping of roles to the data's words, as"
            f" {{user: customer, assistant: agent}}, got {roles!r}"
        )
    names: dict[str, str] = {}
    for role, words in roles.items():
        if role not in ROLE_NAMES:
            raise unknown_key(f"{location}.roles", str(role), ROLE_NAMES)
        for word in [words] if isinstance(words, str) else words or []:
            if not isinstance(word, str):
                raise UsageError(f"{location}.roles.{role}: expected text, got {word!r}")
            if names.get(word, role) != role:
                raise UsageError(f"{location}.roles: {word} is {names[word]} and {role}")
            names[word] = role
    return names


def source_names(value: Any) -> list[str]:
    """Returns the names of the sources of `data.train` or `data.eval`. The value may have any of
    the allowed forms, and may come from a damaged file.
    """
    if isinstance(value, dict) and "name" not in value:  # evaluation sets
        return [name for value in value.values() for name in source_names(value)]
    if value is None:
        return []
    entries = value if isinstance(value, list) else [value]
    names = [entry.get("name", "?") if isinstance(entry, dict) else entry for entry in entries]
    return [str(name) for name in names]


def short_source_names(value: Any) -> str:
    """Returns the names without their folders, as one line: `chats.jsonl, share.jsonl`."""
    return ", ".join(name.rstrip("/").rpartition("/")[2] or name for name in source_names(value))


def first_source_name(value: Any) -> str:
    """Returns the name of the first source, which becomes a part of the run's name."""
    return next(iter(source_names(value)), "data").removeprefix(HUB_PREFIX)


# columns of a table of pictures that `columns` can rename
PICTURE_COLUMNS = ("image", "text", "mask", "control")


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureSource:
    """One entry of images.train, images.eval or images.regularisation, as the user wrote it.

    caption     one caption for all pictures, which replaces the captions from text files
    repeats     how often each picture is used in an epoch
    weight      the weight of the loss of these pictures; only for regularisation pictures
    draw        number of pictures that the folder must contain: the base model generates the
                missing pictures; only for regularisation pictures
    resolution  replaces `images.resolution`; with several values each picture is used once at each
                resolution
    controls    folders with the pictures before the edit, one for each of these pictures
    frames      the number of frames of each clip; 1 if the source contains pictures
    """

    name: str
    key: str
    caption: str | None = None
    repeats: int = 1
    weight: float = 1.0
    draw: int | None = None
    resolution: tuple[int, ...] = ()
    columns: Mapping[str, str] | None = None
    controls: tuple[str, ...] = ()
    frames: int = 1


_PICTURE_KEYS = {
    "train": ("name", "caption", "columns", "repeats", "controls", "resolution", "frames"),
    "eval": ("name", "caption", "columns", "controls", "resolution", "frames"),
    "regularisation": (
        "name",
        "caption",
        "columns",
        "repeats",
        "weight",
        "draw",
        "controls",
        "resolution",
        "frames",
    ),
}


def picture_sources(images: ImagesSection, split: str) -> list[PictureSource]:
    """Returns the sources of one key of `images`. The section's `columns` and `controls` apply to
    each of them.

    split   `train`, `eval` or `regularisation`
    Raises  UsageError naming the entry and the key
    """
    value = getattr(images, split)
    key = f"images.{split}"
    if value is None:
        return []
    sources = [
        _build_picture_source(settings, location, split, images)
        for location, settings in list_entries(value, key, description="folder or file")
    ]
    names = set()
    for source in sources:
        if (source.name, source.frames) in names:
            hint = "" if split == "eval" else "; repeats makes its pictures come more often"
            raise UsageError(f"{key}: {source.name} is named twice{hint}")
        names.add((source.name, source.frames))
    return sources


def _build_picture_source(
    settings: dict[str, Any], location: str, split: str, images: ImagesSection
) -> PictureSource:
    for key, reason in {
        "weight": f"only images.regularisation has it: the pictures of images.{split} count in full",
        "draw": f"only images.regularisation has it: the pictures of images.{split} are your own",
        "repeats": "has no effect: evaluation takes every picture once",
    }.items():
        if settings.get(key) is not None and key not in _PICTURE_KEYS[split]:
            raise UsageError(f"{location}.{key}: {reason}")
    defaults = {"columns": images.columns, "controls": images.controls, "frames": images.frames}
    merged = defaults | {key: value for key, value in settings.items() if value is not None}
    settings = _check_entry(merged, location, _PICTURE_KEYS[split], "a folder or a file")
    caption = settings.get("caption")
    value = settings.pop("resolution", None)
    if isinstance(value, list):
        resolution = tuple(value)
    elif value is None:
        resolution = ()
    else:
        resolution = (value,)
    numbers = [
        ("repeats", settings.get("repeats", 1)),
        ("draw", settings.get("draw", 1)),
        ("frames", settings["frames"]),
        *(("resolution", side) for side in resolution),
    ]
    for key, number in numbers:
        _require_positive_integer(f"{location}.{key}", number)
    if "draw" in settings and not caption:
        raise UsageError(
            f"{location}.draw: needs caption, the prompt that the pictures are drawn from",
            fix="caption: a photo of a person",
        )
    if "draw" in settings and "repeats" in settings:
        raise UsageError(
            f"{location}.repeats: has no effect with draw: class pictures come one to one with the"
            " others"
        )
    if not isinstance(settings.get("caption", ""), str):
        raise UsageError(f"{location}.caption: expected text, got {caption!r}")
    controls = control_folders(settings.pop("controls", None), f"{location}.controls")
    if unknown := next(
        (key for key in settings.get("columns") or () if key not in PICTURE_COLUMNS), None
    ):
        raise UsageError(
            f"{location}.columns: unknown key {unknown!r}: expected {', '.join(PICTURE_COLUMNS)}"
        )
    return PictureSource(
        key=location,
        resolution=tuple(dict.fromkeys(resolution)),
        controls=controls,
        **settings,
    )


def control_folders(value: Any, location: str) -> tuple[str, ...]:
    """Returns the folders of the setting `controls`, which is one folder or a list of folders.
    Raises UsageError.
    """
    if value is None:
        return ()
    folders = value if isinstance(value, list) else [value]
    if not folders or not all(isinstance(folder, str) and folder for folder in folders):
        raise UsageError(f"{location}: expected a folder or a list of folders, got {value!r}")
    if len(set(folders)) < len(folders):
        raise UsageError(f"{location}: the same folder is named twice: {', '.join(folders)}")
    return tuple(folders)
