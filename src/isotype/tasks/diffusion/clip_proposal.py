"""Proposes the settings of a run on clips for `isotype init`: the number of frames and the
resolution that fit the clips of a folder. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...config.kind import PIPELINE_FILE
from ...data.pictures import BadPicture, open_picture
from .picture_files import caption_files, list_files, readable_pictures
from .video_files import count_frames, is_video, missing_pyav, read_frames


@dataclass(frozen=True)
class _VideoModel:
    """What the settings of clips depend on.

    frame_step      the number of frames that the VAE combines; a key of its configuration overrides
                    it
    frame_step_key  the name of this key
    frame_rate      the frames per second for which the pipeline is made
    """

    frame_step: int
    frame_step_key: str
    frame_rate: float


# class of the diffusers pipeline -> what its clips need
VIDEO_MODELS = {
    "WanPipeline": _VideoModel(4, "scale_factor_temporal", 16.0),
    "LTXPipeline": _VideoModel(8, "temporal_compression_ratio", 25.0),
    "LTX2Pipeline": _VideoModel(8, "temporal_compression_ratio", 24.0),
}
MAX_FRAMES = 33  # about two seconds of Wan; longer clips need much more memory
MAX_SIDE = 480
SIDE_MULTIPLE = 32  # LTX-Video's; Wan's is 16
MAX_MEASURED = 200  # clips
UNMEASURED_FRAMES = 17  # valid for both models


@dataclass(frozen=True)
class SettingsProposal:
    """The settings of a run on a folder of clips or pictures, and messages that give their reasons."""

    settings: dict[str, Any] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)


def propose_clip_settings(model: str, data: str) -> SettingsProposal | None:
    """Returns the settings for a folder of clips. Returns None if the folder contains no clips, or
    if the model does not generate videos.
    """
    folder = Path(data).expanduser()
    video_model = _find_video_model(model)
    if video_model is None or not folder.is_dir():
        return None
    files = list_files(folder)
    videos = [path for path in files if is_video(path)]
    frame_folders = _find_frame_folders(files, folder)
    clip_count = len(videos) + len(frame_folders)
    if not clip_count:
        return None
    frame_step = _frame_step(model, video_model)
    lengths: list[int] = [len(frames) for frames in frame_folders]
    sizes = _first_sizes(frame_folders)
    if not missing_pyav(videos):
        for path in videos[:MAX_MEASURED]:
            _measure_video(path, video_model.frame_rate, lengths, sizes)
    frames, reason = _choose_frames(lengths, frame_step, clip_count, video_model.frame_rate)
    settings: dict[str, Any] = {
        "images.frames": frames,
        "images.resolution": _choose_resolution(sizes),
        "images.max_aspect": 2.0,
    }
    reasons = [reason]
    if _has_two_denoisers(model):
        settings["diffusion.expert"] = "low_noise"
        reasons.append(
            "the model has two denoisers: train the other one in a second run, with"
            " diffusion.expert=high_noise and another run.folder"
        )
    return SettingsProposal(settings, reasons)


def _find_video_model(model: str) -> _VideoModel | None:
    """Returns the kind of a model. The kind of a model on the hub is guessed from its name."""
    index = read_json(Path(model).expanduser() / PIPELINE_FILE)
    if index:
        return VIDEO_MODELS.get(str(index.get("_class_name")))
    name = model.lower()
    if "ltx2" in name.replace("-", ""):
        return VIDEO_MODELS["LTX2Pipeline"]
    if "ltx" in name:
        return VIDEO_MODELS["LTXPipeline"]
    return VIDEO_MODELS["WanPipeline"] if "wan" in name else None


def _has_two_denoisers(model: str) -> bool:
    index = read_json(Path(model).expanduser() / PIPELINE_FILE)
    if index:
        return (index.get("transformer_2") or [None])[0] is not None
    return "wan2.2" in model.lower() and "a14b" in model.lower()


def _frame_step(model: str, video_model: _VideoModel) -> int:
    config = read_json(Path(model).expanduser() / "vae/config.json")
    return int(config.get(video_model.frame_step_key) or video_model.frame_step)


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object. Returns an empty mapping if the file does not contain one."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _find_frame_folders(files: list[Path], folder: Path) -> list[list[Path]]:
    """Returns the frames of each subfolder that has a caption file of its own. A subfolder without
    one contains pictures that are not frames of a clip.
    """
    frames: dict[Path, list[Path]] = {}
    for path in readable_pictures(files):
        if path.parent != folder and not is_video(path):
            frames.setdefault(path.parent, []).append(path)
    return [paths for parent, paths in frames.items() if caption_files(parent)]


def _first_sizes(frame_folders: Sequence[list[Path]]) -> list[tuple[int, int]]:
    sizes = []
    for frames in frame_folders[:MAX_MEASURED]:
        try:
            sizes.append(open_picture(frames[0].read_bytes()).size)
        except (BadPicture, OSError):
            continue
    return sizes


def _measure_video(
    path: Path, frame_rate: float, lengths: list[int], sizes: list[tuple[int, int]]
) -> None:
    """Adds the number of frames and the size of a video. A file that cannot be read is left out."""
    try:
        lengths.append(count_frames(path, frame_rate))
        sizes.append(next(read_frames(path, frame_rate, 1)).size)
    except (BadPicture, OSError):
        return


def _choose_frames(
    lengths: Sequence[int], frame_step: int, clip_count: int, frame_rate: float
) -> tuple[int, str]:
    """Returns the number of frames of a clip, and its reason. At least 95% of the clips have so
    many frames, because `images.on_bad_row: skip` leaves out at most 5%.
    """
    if not lengths:
        frames = 1 + (UNMEASURED_FRAMES - 1) // frame_step * frame_step
        return frames, (
            f"images.frames: {frames}: the clips were not measured, which needs PyAV (the extra"
            " `video`)"
        )
    ordered = sorted(lengths)
    shortest = ordered[len(ordered) // 20]
    longest_allowed = min(shortest, MAX_FRAMES)
    frames = 1 + max(1, (longest_allowed - 1) // frame_step) * frame_step
    reason = (
        f"images.frames: {frames}: the shortest of {clip_count} clips has {ordered[0]} frames at"
        f" {frame_rate:g} per second"
    )
    if shortest > MAX_FRAMES:
        reason += "; more frames need more memory (isotype plan)"
    return frames, reason


def _choose_resolution(sizes: Sequence[tuple[int, int]]) -> int:
    """Returns the side of a square that is not larger than the smallest clip."""
    sides = [math.isqrt(width * height) for width, height in sizes]
    smallest = min([MAX_SIDE, *sides])
    return max(SIDE_MULTIPLE, smallest // SIDE_MULTIPLE * SIDE_MULTIPLE)
