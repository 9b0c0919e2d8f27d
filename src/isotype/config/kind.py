"""Tells language runs from diffusion runs, and holds the keys that only one kind of run has.
Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from ..errors import UsageError
from .schema import RunConfig
from .sources import config_file

LANGUAGE = "language"
DIFFUSION = "diffusion"
PIPELINE_FILE = "model_index.json"
MODULAR_FILE = "modular_model_index.json"

# keys, or sections ending in a dot, that only one kind of run has
KEYS_OF_KIND: Mapping[str, tuple[str, ...]] = {
    DIFFUSION: (
        "images.", "diffusion.", "model.vae", "precision.vae", "precision.text_encoder", "precision.timesteps", "precision.latents",
        "precision.ema", "train.ema", "run.sample_steps", "run.sample_size", "run.sample_frames", "run.sample_guidance",
        "run.adapter_format", "adapter.factor", "adapter.text_encoders", "adapter.text_encoder_rate",
    ),
    LANGUAGE: (
        "data.", "preference.", "distil.", "train.objective", "train.aux_loss", "train.embedding_noise", "adapter.parameters",
        "adapter.train_tokens", "adapter.modules_to_save", "adapter.vision", "adapter.projector",
        "adapter.serve_as", "adapter.serve_from",
        "precision.vision",
        "model.tokenizer", "model.attention", "model.allow_unquantised", "model.rope_parameters",
        "model.trust_remote_code", "run.sample_tokens",
    ),
}  # fmt: skip
# objective -> the keys of the section `preference` that it reads
PREFERENCE_KEYS: Mapping[str, tuple[str, ...]] = {
    "sft": (),
    "dpo": ("beta", "label_smoothing", "nll"),
    "ipo": ("beta", "nll"),
    "simpo": ("beta", "simpo_gamma", "nll"),
    "orpo": ("beta", "nll"),
    "cpo": ("beta", "label_smoothing", "nll"),
    "kto": ("beta", "desirable_weight", "undesirable_weight"),
    "reward": ("center_rewards_coefficient",),
    "distil": (),
}
# objectives that need the log-probabilities of the initial model
REFERENCE_OBJECTIVES = ("dpo", "ipo", "kto")
# objective -> the only data format that it learns from; sft learns from the other formats
FORMAT_OF_OBJECTIVE: Mapping[str, Literal["preference", "labelled"]] = {
    **dict.fromkeys(("dpo", "ipo", "simpo", "orpo", "cpo", "reward"), "preference"), "kto": "labelled"
}  # fmt: skip
DIFFUSION_COUNTERPARTS = {
    "data.train": "images.train", "data.eval": "images.eval", "data.eval_split": "images.eval_split", "data.limit": "images.limit",
    "data.shuffle": "images.shuffle", "data.cache": "images.cache", "run.sample_tokens": "run.sample_steps",
    "data.max_length": "diffusion.max_text_length", "data.columns": "images.columns", "data.on_bad_row": "images.on_bad_row",
}  # fmt: skip


GGUF_REFUSAL = "a denoiser packed as GGUF is for inference, and is not read"
GGUF_FIX = "the same model's .safetensors; precision.preset: nf4-lora packs it as small"


def detect_run_kind(config: RunConfig) -> str:
    """Returns `diffusion` in three cases: the model's folder is a diffusers pipeline,
    `model.config` names a class of diffusers, or the model is a hub id and the configuration has
    pictures and no text.
    """
    name = config.model.name
    if is_denoiser(config.model.config):
        return DIFFUSION
    if name is None:
        return LANGUAGE
    folder = Path(name).expanduser()
    if folder.is_dir():
        return DIFFUSION if is_pipeline(folder) else LANGUAGE
    if config.images.train is not None and config.data.train is None:
        return DIFFUSION
    return LANGUAGE


def is_pipeline(folder: Path) -> bool:
    """Returns whether a folder is a pipeline of diffusers. A modular pipeline is one too; it is
    refused when it is opened.
    """
    return any((folder / name).is_file() for name in (PIPELINE_FILE, MODULAR_FILE))


PICTURE_SUFFIXES = (
    ".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif", ".heic", ".heif", ".hif",
)  # fmt: skip
"""The endings of picture files. The last four can be read only where Pillow or a plugin of it
supports them.
"""


VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi")
"""The endings of the video files that PyAV reads. A GIF file is a picture or a video."""


def guess_run_kind(model: str, data: str) -> str:
    """Returns the kind of run for a new configuration file: by the model's folder if it exists,
    else by whether the data is a folder with pictures, with videos, or with subfolders of pictures
    that are the frames of a video.
    """
    folder = Path(model).expanduser()
    pictures = Path(data).expanduser()
    if folder.is_dir():
        return DIFFUSION if is_pipeline(folder) else LANGUAGE
    suffixes = (*PICTURE_SUFFIXES, *VIDEO_SUFFIXES)
    has_pictures = pictures.is_dir() and any(
        path.suffix.lower() in suffixes
        for pattern in ("*", "*/*")
        for path in pictures.glob(pattern)
    )
    return DIFFUSION if has_pictures else LANGUAGE


def is_denoiser(model_config: dict[str, Any] | str | None) -> bool:
    """Returns True if a `model.config`, or the JSON file that it names, describes a diffusers
    model. Configurations of diffusers models have the key `_class_name`.
    """
    if isinstance(model_config, str):
        try:
            file = config_file(model_config)
            return _file_has_class_name(file, file.stat().st_mtime_ns)
        except (OSError, ValueError):
            return False
    return isinstance(model_config, dict) and "_class_name" in model_config


@lru_cache
def _file_has_class_name(file: Path, _changed: int) -> bool:
    """Returns True if the JSON file has `_class_name`. The result is cached for each modification
    time of the file.
    """
    content = json.loads(file.read_text(encoding="utf-8"))
    return isinstance(content, dict) and "_class_name" in content


def is_key_of_kind(key: str, kind: str) -> bool:
    """Returns True if this kind of run has the key."""
    return not any(
        _matches_key(key, keys) for other_kind, keys in KEYS_OF_KIND.items() if other_kind != kind
    )


def refuse_inapplicable_keys(config: RunConfig, sources: Mapping[str, str]) -> None:
    """Raises UsageError with a line for each key that was set but does not apply to this kind of
    run.
    """
    kind = detect_run_kind(config)
    name = config.model.name
    if (
        kind == LANGUAGE
        and name is not None
        and config.images.train is not None
        and config.data.train is None
    ):
        raise UsageError(
            f"{sources['model.name']} model.name: {name}: no {PIPELINE_FILE} there: images.train"
            " needs a diffusers pipeline",
            fix=(
                "model.name: a folder that has one, or a pipeline's name on the hub; to train this"
                " model on text: data.train"
            ),
        )
    lines = []
    objective = config.train.objective
    for key, source in sources.items():
        if source == "default":
            continue
        if is_key_of_kind(key, kind):
            section, _, name = key.partition(".")
            if section == "distil" and objective != "distil":
                lines.append(
                    f"{source} {key}: does not apply to train.objective: {objective}, but to distil"
                )
            if key == "train.embedding_noise" and objective != "sft":
                lines.append(
                    f"{source} {key}: does not apply to train.objective: {objective}, but to sft"
                )
            if section == "preference" and name not in PREFERENCE_KEYS[objective]:
                allowed = [
                    candidate
                    for candidate, preference_keys in PREFERENCE_KEYS.items()
                    if name in preference_keys
                ]
                lines.append(
                    f"{source} {key}: does not apply to train.objective: {objective}, but to"
                    f" {', '.join(allowed)}"
                )
            continue
        counterparts = (
            {v: k for k, v in DIFFUSION_COUNTERPARTS.items()}
            if kind == LANGUAGE
            else DIFFUSION_COUNTERPARTS
        )
        hint = f"; here it is {counterparts[key]}" if key in counterparts else ""
        lines.append(f"{source} {key}: does not apply to a {kind} run ({config.model.name}){hint}")
    if lines:
        raise UsageError("\n".join(lines))


def _matches_key(key: str, keys: tuple[str, ...]) -> bool:
    return any(
        key.startswith(pattern) if pattern.endswith(".") else key == pattern for pattern in keys
    )
