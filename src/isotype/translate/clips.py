"""Reads the files of musubi-tuner and of diffusion-pipe, which train models for videos. The module
also has functions for the settings of clips that several tools share. The keys of the N-th dataset
are named `dataset.N.KEY`.

Sources  musubi-tuner 30c658c, diffusion-pipe 8f83dbf
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..config.kind import VIDEO_SUFFIXES
from ..doctor.check.text_files import Tree, read_toml
from . import pictures
from .transforms import ConfigDraft, SourceKey

MUSUBI = "musubi-tuner"
DIFFUSION_PIPE = "diffusion-pipe"
_MUSUBI_PROGRAM = re.compile(
    r"^(wan|hv|hv_1_5|fpack|flux_2|flux_kontext|hidream_o1|ideogram4|kandinsky5|krea2|qwen_image"
    r"|zimage)_train(_network)?\.py$"
)
_MUSUBI_DATA = ("video_directory", "video_jsonl_file", "image_directory", "image_jsonl_file")
NO_PICTURE_NOTE = (
    "only models that generate videos from text are trained, and none that continue a picture"
)
HEAD_NOTE = "the first frames of each video, at images.frame_rate"
OTHER_PARTS_NOTE = (
    f"a clip has {HEAD_NOTE}: cut the videos into pieces to train on their other parts"
)
FRAME_RATE_NOTE = "the rate is read from each file; clips have images.frame_rate"
ONE_EXPERT_NOTE = (
    "a run trains one denoiser: train the other one in a second run, with diffusion.expert={} and"
    " another run.folder"
)


def is_musubi_program(program: str) -> bool:
    """Returns True if a training script belongs to musubi-tuner, for example
    `wan_train_network.py`.
    """
    return _MUSUBI_PROGRAM.match(program.rpartition("/")[2]) is not None


def detect_video_tool(data: Any) -> str | None:
    """Returns `musubi-tuner` or `diffusion-pipe` for the content of a file of these tools, else
    None.
    """
    if not isinstance(data, dict):
        return None
    datasets = data.get("datasets")
    if isinstance(datasets, list):
        keys = {key for entry in datasets if isinstance(entry, dict) for key in entry}
        if keys & set(_MUSUBI_DATA):
            return MUSUBI
    tables = [data, *(value for value in data.values() if isinstance(value, dict))]
    if any("dit" in table and "network_module" in table for table in tables):
        return MUSUBI
    model = data.get("model")
    if "dataset" in data and isinstance(model, dict) and "type" in model:
        return DIFFUSION_PIPE
    if isinstance(data.get("directory"), list) and {"resolutions", "size_buckets"} & set(data):
        return DIFFUSION_PIPE
    return None


# --- the keys of the files


def read_video_keys(tool: str, tree: Tree, path: Path) -> Iterator[SourceKey]:
    """Yields the keys of a file of musubi-tuner or diffusion-pipe, and of the dataset file that it
    names. Raises UsageError if this file cannot be read.
    """
    if tool == DIFFUSION_PIPE:
        yield from _diffusion_pipe_keys(tree, path)
        return
    for key in _musubi_keys(tree):
        yield key
        if key.name == "dataset_config":
            yield from read_musubi_datasets(key.value, path)


def _musubi_keys(tree: Tree) -> Iterator[SourceKey]:
    """Yields the keys of a training configuration or of a dataset configuration. In a training
    configuration, keys are yielded without the names of their tables.
    """
    for key, value in tree.data.items():
        if key in ("general", "datasets"):
            continue
        if isinstance(value, dict):
            for inner, inner_value in value.items():
                yield SourceKey(str(inner), inner_value, tree.lines.get((key, inner)), str(inner))
        else:
            yield SourceKey(str(key), value, tree.lines.get((key,)), str(key))
    yield from _musubi_dataset_keys(tree, "")


def read_musubi_datasets(file_name: object, config: Path) -> Iterator[SourceKey]:
    """Yields the keys of the file that `--dataset_config` names. If the file does not exist, yields
    nothing. Raises UsageError if the file cannot be read.
    """
    file = pictures.find_file(str(file_name), Path("."), config.parent)
    if isinstance(file_name, str) and file is not None:
        yield from _musubi_dataset_keys(pictures.read_tree(file, read_toml), f"{file.name}: ")


def _musubi_dataset_keys(tree: Tree, label_prefix: str) -> Iterator[SourceKey]:
    """Yields the keys of every dataset, with the keys of [general] that it inherits."""
    general = tree.data.get("general", {})
    for i, dataset in enumerate(tree.data.get("datasets", [])):
        for key, value in {**general, **dataset}.items():
            line = tree.lines.get(("datasets", i, key)) or tree.lines.get(("general", key))
            name = f"{pictures.DATASET_PREFIX}.{i}.{key}"
            yield SourceKey(name, value, line, f"{label_prefix}{key}")


def _diffusion_pipe_keys(tree: Tree, path: Path) -> Iterator[SourceKey]:
    """Yields the keys of a training configuration, and those of the dataset configuration that it
    names. The file may also be a dataset configuration.
    """
    if "directory" in tree.data:
        yield from _diffusion_pipe_dataset_keys(tree, "")
        return
    yield from pictures.nested_keys(tree.data, tree)
    dataset = tree.data.get("dataset")
    if isinstance(dataset, str):
        folders = (path.parent, *path.absolute().parents[1:4], Path("."))
        if (file := pictures.find_file(dataset, *folders)) is not None:
            file_tree = pictures.read_tree(file, read_toml)
            yield from _diffusion_pipe_dataset_keys(file_tree, f"{file.name}: ")


def _diffusion_pipe_dataset_keys(tree: Tree, label_prefix: str) -> Iterator[SourceKey]:
    """Yields the keys of every [[directory]], with the keys of the file that it inherits."""
    common = {key: value for key, value in tree.data.items() if key != "directory"}
    for i, directory in enumerate(tree.data.get("directory", [])):
        for key, value in {**common, **directory}.items():
            line = tree.lines.get(("directory", i, key)) or tree.lines.get((key,))
            name = f"{pictures.DATASET_PREFIX}.{i}.{key}"
            yield SourceKey(name, value, line, f"{label_prefix}{key}")


# --- settings of clips


def frame_step(model: object) -> int:
    """Returns the number of frames that the VAE of a model combines: 8 for LTX-Video, 4 for Wan."""
    return 8 if "ltx" in str(model).lower() else 4


def frame_counts(value: Any, step: int) -> list[int]:
    """Returns the numbers of frames in a setting such as `[1, 25, 45]` or 81, in ascending order.
    Each is rounded down to 1 plus a multiple of `step`.
    """
    numbers = value if isinstance(value, list) else [value]
    return sorted({1 + (max(1, int(number)) - 1) // step * step for number in numbers})


def set_frames(draft: ConfigDraft, source_key: SourceKey, frames: int, note: str) -> None:
    """Sets `images.frames` to the largest number of frames. For sources with another number, the
    number is set in the entry of the source.
    """
    largest = int(draft.settings.get("images.frames", 1))
    if frames == 1:
        draft.report_no_effect(source_key, "pictures: images.frames is 1")
    elif frames < largest:
        own_note = f"frames: {frames} of the source"
        draft.report_changed(source_key, f"{own_note}; {note}" if note else own_note)
    else:
        draft.set(source_key, "images.frames", frames, note)


def area_side(width: float, height: float, multiple: int = 16) -> int:
    """Returns the side of a square with about as many pixels as a picture of this size. The side is
    a multiple of `multiple`.
    """
    side = math.sqrt(width * height)
    return max(multiple, int(side // multiple * multiple))


def set_sample_size(draft: ConfigDraft, width: int, height: int) -> None:
    """Adds the size to each prompt of `run.samples` if it is not a square. `run.sample_size` is the
    side of a square.
    """
    if width == height or "run.samples" not in draft.settings:
        return
    draft.settings.pop("run.sample_size", None)
    samples = []
    for sample in draft.settings["run.samples"]:
        settings = {"prompt": sample} if isinstance(sample, str) else sample
        samples.append({"size": f"{width}x{height}", **settings})
    draft.settings["run.samples"] = samples


def is_high_noise(*names: object) -> bool:
    """Returns True if the file of a denoiser of Wan 2.2 is named as the one for high noise."""
    return any("high" in str(name).lower() for name in names)


def has_no_videos(folder: object, base: str) -> bool:
    """Returns True if the folder exists and contains no video file, so that it is a folder of
    pictures.
    """
    for root in (Path(str(folder)), Path(base) / str(folder)):
        if root.is_dir():
            suffixes = (*VIDEO_SUFFIXES, ".gif")
            return not any(path.suffix.lower() in suffixes for path in root.rglob("*"))
    return False


def dataset_of_key(draft: ConfigDraft, source_key: SourceKey) -> Mapping[str, Any]:
    """Returns the dataset to which a key such as `dataset.0.path` belongs."""
    index = source_key.name.split(".")[1]
    prefix = f"{pictures.DATASET_PREFIX}.{index}."
    return {
        name.removeprefix(prefix): value
        for name, value in draft.source_values.items()
        if name.startswith(prefix)
    }
