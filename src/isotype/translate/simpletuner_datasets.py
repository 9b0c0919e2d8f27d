"""SimpleTuner's dataset file (multidatabackend.json): each key of each dataset, and the sources of `images` that come of them."""

from __future__ import annotations

from typing import Any

from .draft import Draft, Given
from .transforms import Handler, changed, each, no_effect, not_offered, to, truth

STORES = ("text_embeds", "image_embeds", "conditioning_image_embeds")
KEPT = "latents and embeddings are kept under a key of all that shaped them: images.cache"
_TABLE_COLUMNS = "the source is the table itself; images.columns names its columns"
_SQUARES = "squares are the default: images.max_aspect"


def dataset_key(draft: Draft, given: Given) -> None:
    """One key of one dataset: `dataset.0.repeats`."""
    _, index, key = given.name.split(".", 2)
    entry = _entry(draft, index)
    kind, store = str(entry.get("dataset_type", "image")), str(entry.get("type", "local"))
    if truth(entry.get("disabled", entry.get("disable", False))):
        draft.no_effect(given, "the dataset is switched off")
    elif kind in STORES or key.startswith("cache_dir"):
        draft.no_effect(given, KEPT)
    elif kind == "conditioning" and str(entry.get("conditioning_type")) != "mask":
        draft.not_offered(given, f"conditioning of type {entry.get('conditioning_type', 'controlnet')}: only masks")
    elif kind == "conditioning":
        mask = key == "instance_data_dir"
        (to("images.masks", str) if mask else no_effect("a mask belongs to the picture of its name"))(draft, given)
    elif kind not in ("image", "eval"):
        draft.not_offered(given, f"{kind} datasets")
    elif store not in ("local", "csv"):
        draft.not_offered(given, f"a dataset of type {store}: put its pictures into a folder, and the folder into images.train")
    elif handler := _PICTURES.get(key.partition(".")[0]):
        handler(draft, given)
    elif given.value in (None, "", False, 0, [], {}):
        draft.no_effect(given, "switched off")
    else:
        draft.not_offered(given, "isotype import does not know this key of a dataset")


def pixels(value: Any, kind: object) -> int:
    """The side of a square in pixels; megapixels where `kind` is area."""
    size = float(value)
    return int(size) if str(kind) != "area" else max(64, round((size * 1e6) ** 0.5 / 64) * 64)


def _entry(draft: Draft, index: object) -> dict[str, Any]:
    """The dataset with this number."""
    before = f"dataset.{index}."
    return {name.removeprefix(before): value for name, value in draft.keys.items() if name.startswith(before)}


def _of(draft: Draft, given: Given) -> dict[str, Any]:
    """The dataset to which a key belongs."""
    return _entry(draft, given.name.split(".")[1])


def _side(entry: dict[str, Any]) -> str:
    if str(entry.get("dataset_type")) == "eval":
        return "images.eval"
    return "images.regularisation" if truth(entry.get("is_regularisation_data", False)) else "images.train"


def _by_instance_prompt(entry: dict[str, Any]) -> bool:
    return str(entry.get("caption_strategy")) == "instanceprompt" or truth(entry.get("only_instance_prompt", False))


def _times(entry: dict[str, Any]) -> int:
    return int(float(entry.get("repeats") or 0)) + 1


def _folder(draft: Draft, given: Given) -> None:
    draft.set(given, _side(_of(draft, given)), str(given.value))


def _repeats(draft: Draft, given: Given) -> None:
    times = int(float(given.value or 0)) + 1
    said = f"{_side(_of(draft, given))}: repeats: {times}, since 0 is once there"
    draft.changed(given, said if times > 1 else "every picture once an epoch")


def _instance_prompt(draft: Draft, given: Given) -> None:
    entry = _of(draft, given)
    if _by_instance_prompt(entry):
        draft.changed(given, f"{_side(entry)}: caption: {given.value}")
    else:
        draft.no_effect(given, "without caption_strategy instanceprompt")


def _only_instance_prompt(draft: Draft, given: Given) -> None:
    draft.changed(given, f"{_side(_of(draft, given))}: caption" if truth(given.value) else "captions of their own")


def _caption_strategy(draft: Draft, given: Given) -> None:
    word = str(given.value)
    if word == "textfile":
        draft.no_effect(given, "a .txt beside each picture, a caption a line: what is read by default")
    elif word == "instanceprompt":
        draft.changed(given, f"{_side(_of(draft, given))}: caption")
    elif word in ("parquet", "csv"):
        draft.changed(given, _TABLE_COLUMNS)
    else:
        draft.not_offered(given, "captions stand in a .txt beside each picture, or in a table's column")


def _resolution(draft: Draft, given: Given) -> None:
    size = pixels(given.value, _of(draft, given).get("resolution_type", draft.keys.get("resolution_type", "pixel_area")))
    before = draft.settings.get("images.resolution")
    if before is not None and before != size and draft.sources["images.resolution"].name.startswith("dataset."):
        draft.not_offered(given, f"a run has one resolution, that of the first dataset: {before}")
    else:
        draft.set(given, "images.resolution", size)


def _crop_aspect(draft: Draft, given: Given) -> None:
    """Squares where pictures are cut to squares, else aspect buckets."""
    entry = _of(draft, given)
    if truth(entry.get("crop", False)) and str(entry.get("crop_aspect", "square")) == "square":
        draft.no_effect(given, _SQUARES)
    else:
        draft.set(given, "images.max_aspect", 2.0, "aspect buckets; what a picture is longer than 2 : 1 is cut off")


def _crop_style(draft: Draft, given: Given) -> None:
    word = str(given.value)
    if not truth(_of(draft, given).get("crop", True)):
        draft.no_effect(given, "without crop")
    elif word == "random":
        draft.set(given, "images.crop", 4, "so many windows of each picture are kept; one is drawn each time")
    else:
        draft.set(given, "images.crop", "center", "" if word == "center" else f"{word} is not offered")


def _probability(draft: Draft, given: Given) -> None:
    if float(given.value or 1) != 1:
        draft.not_offered(given, "repeats of a source make its pictures come more often")
    else:
        draft.no_effect(given, "switched off")


_PICTURES: dict[str, Handler] = {
    **each(_folder, "instance_data_dir data_dir"),
    "repeats": _repeats,
    "is_regularisation_data": lambda draft, given: draft.changed(given, f"images.{'regularisation' if truth(given.value) else 'train'}"),
    "caption_strategy": _caption_strategy,
    "instance_prompt": _instance_prompt,
    "only_instance_prompt": _only_instance_prompt,
    **each(
        not_offered("captions are taken as they are, a line each"),
        "prepend_instance_prompt caption_shuffle caption_filter_list disable_multiline_split",
    ),
    "parquet": changed(_TABLE_COLUMNS),
    "resolution": _resolution,
    "resolution_type": no_effect("images.resolution is a side in pixels"),
    **each(_crop_aspect, "crop crop_aspect"),
    "crop_style": _crop_style,
    "crop_aspect_buckets": no_effect("buckets follow images.resolution and images.max_aspect"),
    "conditioning_data": changed("images.masks, where it holds masks"),
    "probability": _probability,
    **each(
        lambda draft, given: draft.not_offered(given, "no picture is left out for its size: take it out of the folder"),
        "minimum_image_size minimum_aspect_ratio maximum_aspect_ratio",
    ),
    **each(no_effect("pictures are scaled before they are cut"), "maximum_image_size target_downsample_size"),
    "id": no_effect("a name"),
    **each(no_effect("the pictures' folder says it"), "type dataset_type"),
    "metadata_backend": no_effect("pictures are opened for their size"),
    "vae_cache_clear_each_epoch": no_effect("windows at random are kept, and drawn anew each time: images.crop"),
    **each(
        no_effect(KEPT),
        "cache_file_suffix text_embeds image_embeds skip_file_discovery preserve_data_backend_cache default write_batch_size "
        "read_batch_size hash_filenames hash_filename",
    ),
}


def finish_datasets(draft: Draft) -> None:
    """The sources of each side, in place of the last folder that was set."""
    sides: dict[str, list[Any]] = {}
    count = 1 + max((int(name.split(".")[1]) for name in draft.keys if name.startswith("dataset.")), default=-1)
    for index in range(count):
        entry = _entry(draft, index)
        folder = entry.get("instance_data_dir", entry.get("data_dir"))
        used = not truth(entry.get("disabled", False)) and str(entry.get("type", "local")) in ("local", "csv")
        if folder is None or not used or str(entry.get("dataset_type", "image")) not in ("image", "eval"):
            continue
        table = entry.get("parquet")
        source: dict[str, Any] = {"name": str((table.get("path") if isinstance(table, dict) else entry.get("csv_file")) or folder)}
        if _by_instance_prompt(entry) and entry.get("instance_prompt"):
            source["caption"] = str(entry["instance_prompt"])
        if _times(entry) > 1 and _side(entry) != "images.eval":
            source["repeats"] = _times(entry)
        sides.setdefault(_side(entry), []).append(source if len(source) > 1 else source["name"])
    for side, sources in sides.items():
        draft.settings[side] = sources[0] if len(sources) == 1 and isinstance(sources[0], str) else sources
    if "images.train" not in draft.settings and count == 0:
        named = draft.keys.get("data_backend_config") or "data_backend_config"
        draft.notes.append(f"the dataset file was not found ({named}): name your pictures in images.train")
