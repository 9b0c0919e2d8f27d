"""SimpleTuner's dataset file (multidatabackend.json): each key of each dataset, and the sources of `images` that come of them."""

from __future__ import annotations

from typing import Any

from .account import Draft, Given, truth

STORES = ("text_embeds", "image_embeds", "conditioning_image_embeds")
_RANDOM_WINDOWS = 4
_ABOUT_STORES = "latents and embeddings are kept under a key of all that shaped them: images.cache"
_NO_EFFECT = {
    "id": "a name",
    "type": "the pictures' folder says it",
    "dataset_type": "the pictures' folder says it",
    "metadata_backend": "pictures are opened for their size",
    "instance_prompt": "without caption_strategy instanceprompt",
    "maximum_image_size": "pictures are scaled before they are cut",
    "target_downsample_size": "pictures are scaled before they are cut",
    "resolution_type": "images.resolution is a side in pixels",
    "crop_style": "without crop",
    "crop_aspect_buckets": "buckets follow images.resolution and images.max_aspect",
    "vae_cache_clear_each_epoch": "windows at random are kept, and drawn anew each time: images.crop",
    **dict.fromkeys(
        ("cache_file_suffix", "text_embeds", "image_embeds", "skip_file_discovery", "preserve_data_backend_cache", "default",
         "write_batch_size", "read_batch_size", "hash_filenames", "hash_filename"),
        _ABOUT_STORES,
    ),
}  # fmt: skip


def dataset_key(draft: Draft, given: Given) -> None:
    """One key of one dataset: `dataset.0.repeats`."""
    _, index, key = given.name.split(".", 2)
    entry = entry_of(draft, index)
    kind = str(entry.get("dataset_type", "image"))
    if truth(entry.get("disabled", entry.get("disable", False))):
        draft.no_effect(given, "the dataset is switched off")
    elif kind in STORES or key.startswith("cache_dir"):
        draft.no_effect(given, _ABOUT_STORES)
    elif kind == "conditioning":
        _mask_key(draft, given, key, entry)
    elif kind not in ("image", "eval"):
        draft.not_offered(given, f"{kind} datasets")
    elif str(entry.get("type", "local")) not in ("local", "csv"):
        draft.not_offered(given, f"a dataset of type {entry.get('type')}: put its pictures into a folder, and the folder into images.train")
    else:
        _image_key(draft, given, key, entry, int(index))


def entry_of(draft: Draft, index: object) -> dict[str, Any]:
    """The dataset with this number."""
    before = f"dataset.{index}."
    return {name.removeprefix(before): value for name, value in draft.keys.items() if name.startswith(before)}


def _mask_key(draft: Draft, given: Given, key: str, entry: dict[str, Any]) -> None:
    if str(entry.get("conditioning_type")) != "mask":
        draft.not_offered(given, f"conditioning of type {entry.get('conditioning_type', 'controlnet')}: only masks")
    elif key == "instance_data_dir":
        draft.set(given, "images.masks", str(given.value))
    else:
        draft.no_effect(given, "a mask belongs to the picture of its name")


def _image_key(draft: Draft, given: Given, key: str, entry: dict[str, Any], index: int) -> None:
    side = side_of(entry)
    if key in ("instance_data_dir", "data_dir"):
        draft.set(given, side, str(given.value))
    elif key == "repeats":
        times = int(float(given.value or 0)) + 1
        draft.changed(given, f"{side}: repeats: {times}, since 0 is once there" if times > 1 else "every picture once an epoch")
    elif key == "is_regularisation_data":
        draft.changed(given, "images.regularisation" if truth(given.value) else "images.train")
    elif key == "caption_strategy":
        _caption_strategy(draft, given, entry, side)
    elif key == "instance_prompt" and _by_instance_prompt(entry):
        draft.changed(given, f"{side}: caption: {given.value}")
    elif key in ("prepend_instance_prompt", "caption_shuffle", "caption_filter_list", "disable_multiline_split") and given.value:
        draft.not_offered(given, "captions are taken as they are, a line each")
    elif key == "only_instance_prompt":
        draft.changed(given, f"{side}: caption" if truth(given.value) else "captions of their own")
    elif key == "parquet" or key.startswith("parquet."):
        draft.changed(given, f"{side} names the table itself; images.columns names its columns")
    elif key == "resolution":
        _resolution(draft, given, entry)
    elif key in ("crop", "crop_aspect"):
        _crop_aspect(draft, given, entry)
    elif key == "crop_style" and truth(entry.get("crop", True)):
        _crop_style(draft, given)
    elif key == "conditioning_data":
        draft.changed(given, "images.masks, where it holds masks")
    elif key == "probability" and float(given.value or 1) != 1:
        draft.not_offered(given, "repeats of a source make its pictures come more often")
    elif key in ("minimum_image_size", "minimum_aspect_ratio", "maximum_aspect_ratio"):
        draft.not_offered(given, "no picture is left out for its size: take it out of the folder")
    elif key in _NO_EFFECT:
        draft.no_effect(given, _NO_EFFECT[key])
    elif given.value in (None, "", False, 0, [], {}):
        draft.no_effect(given, "switched off")
    else:
        draft.not_offered(given, "isotype import does not know this key of a dataset")


def pixels(value: Any, kind: object) -> int:
    """The side of a square in pixels; megapixels where `kind` is area."""
    size = float(value)
    return int(size) if str(kind) != "area" else max(64, round((size * 1e6) ** 0.5 / 64) * 64)


def side_of(entry: dict[str, Any]) -> str:
    if str(entry.get("dataset_type")) == "eval":
        return "images.eval"
    return "images.regularisation" if truth(entry.get("is_regularisation_data", False)) else "images.train"


def _by_instance_prompt(entry: dict[str, Any]) -> bool:
    return str(entry.get("caption_strategy")) == "instanceprompt" or truth(entry.get("only_instance_prompt", False))


def _caption_strategy(draft: Draft, given: Given, entry: dict[str, Any], side: str) -> None:
    word = str(given.value)
    if word == "textfile":
        draft.no_effect(given, "a .txt beside each picture, a caption a line: what is read by default")
    elif word == "instanceprompt":
        draft.changed(given, f"{side}: caption")
    elif word in ("parquet", "csv"):
        draft.changed(given, f"{side} names the table itself; images.columns names its columns")
    else:
        draft.not_offered(given, "captions stand in a .txt beside each picture, or in a table's column")


def _resolution(draft: Draft, given: Given, entry: dict[str, Any]) -> None:
    size = pixels(given.value, entry.get("resolution_type", draft.keys.get("resolution_type", "pixel_area")))
    before = draft.settings.get("images.resolution")
    if before is not None and before != size and draft.sources["images.resolution"].name.startswith("dataset."):
        draft.not_offered(given, f"a run has one resolution, that of the first dataset: {before}")
    else:
        draft.set(given, "images.resolution", size)


def _crop_aspect(draft: Draft, given: Given, entry: dict[str, Any]) -> None:
    """Squares where pictures are cut to squares, else aspect buckets."""
    square = truth(entry.get("crop", False)) and str(entry.get("crop_aspect", "square")) == "square"
    if square:
        draft.no_effect(given, "squares are the default: images.max_aspect")
    else:
        draft.set(given, "images.max_aspect", 2.0, "aspect buckets; what a picture is longer than 2 : 1 is cut off")


def _crop_style(draft: Draft, given: Given) -> None:
    if str(given.value) == "random":
        draft.set(given, "images.crop", _RANDOM_WINDOWS, "so many windows of each picture are kept; one is drawn each time")
    elif str(given.value) == "center":
        draft.set(given, "images.crop", "center")
    else:
        draft.set(given, "images.crop", "center", f"{given.value} is not offered")


def finish_data(draft: Draft) -> None:
    """The sources of each side, in place of the last folder that was set."""
    sides: dict[str, list[Any]] = {}
    count = 1 + max((int(name.split(".")[1]) for name in draft.keys if name.startswith("dataset.")), default=-1)
    for index in range(count):
        entry = entry_of(draft, index)
        folder = entry.get("instance_data_dir", entry.get("data_dir"))
        used = not truth(entry.get("disabled", False)) and str(entry.get("type", "local")) in ("local", "csv")
        if folder is None or not used or str(entry.get("dataset_type", "image")) not in ("image", "eval"):
            continue
        source: dict[str, Any] = {"name": str(_table(entry) or folder)}
        if _by_instance_prompt(entry) and entry.get("instance_prompt"):
            source["caption"] = str(entry["instance_prompt"])
        if (times := int(float(entry.get("repeats") or 0)) + 1) > 1 and side_of(entry) != "images.eval":
            source["repeats"] = times
        sides.setdefault(side_of(entry), []).append(source if len(source) > 1 else source["name"])
    for side, sources in sides.items():
        draft.settings[side] = sources[0] if len(sources) == 1 and isinstance(sources[0], str) else sources
    if "images.train" not in draft.settings and count == 0:
        named = draft.keys.get("data_backend_config") or "data_backend_config"
        draft.notes.append(f"the dataset file was not found ({named}): name your pictures in images.train")


def _table(entry: dict[str, Any]) -> object:
    table = entry.get("parquet")
    return table.get("path") if isinstance(table, dict) else entry.get("csv_file")
