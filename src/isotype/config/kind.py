"""Which kind of run a configuration is and which keys each kind has; torch-free."""

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

# keys, or sections ending in a dot, that only one kind of run has
ONLY: Mapping[str, tuple[str, ...]] = {
    DIFFUSION: (
        "images.", "diffusion.", "precision.vae", "precision.text_encoder", "precision.timesteps", "precision.latents",
        "precision.ema", "train.ema", "run.sample_steps", "run.sample_size", "run.sample_guidance",
        "run.adapter_format", "adapter.factor", "adapter.text_encoders", "adapter.text_encoder_rate",
    ),
    LANGUAGE: (
        "data.", "preference.", "distil.", "train.objective", "train.aux_loss", "train.embedding_noise", "adapter.parameters",
        "adapter.train_tokens", "adapter.modules_to_save", "adapter.vision", "adapter.projector",
        "precision.vision",
        "model.tokenizer", "model.attention", "model.allow_unquantised", "model.rope_parameters",
        "model.trust_remote_code", "run.sample_tokens",
    ),
}  # fmt: skip
# objectives -> their keys of `preference`, and those beside the model as the run starts
OBJECTIVES: Mapping[str, tuple[str, ...]] = {
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
WITH_REFERENCE = ("dpo", "ipo", "kto")
# the one format of data that an objective learns from; sft learns from the others
FORMATS: Mapping[str, Literal["preference", "labelled"]] = {
    **dict.fromkeys(("dpo", "ipo", "simpo", "orpo", "cpo", "reward"), "preference"), "kto": "labelled"
}  # fmt: skip
INSTEAD = {
    "data.train": "images.train", "data.eval": "images.eval", "data.eval_split": "images.eval_split", "data.limit": "images.limit",
    "data.shuffle": "images.shuffle", "data.cache": "images.cache", "run.sample_tokens": "run.sample_steps",
    "data.max_length": "diffusion.max_text_length", "data.columns": "images.columns", "data.on_bad_row": "images.on_bad_row",
}  # fmt: skip


NO_GGUF = "a denoiser packed as GGUF is for inference, and is not read"
INSTEAD_OF_GGUF = "the same model's .safetensors; precision.preset: nf4-lora packs it as small"


def kind_of(config: RunConfig) -> str:
    """`diffusion` where the model's folder is a diffusers pipeline's, where `model.config` has a
    class of diffusers, or where the model is no folder and pictures are given.
    """
    name = config.model.name
    if is_denoiser(config.model.config):
        return DIFFUSION
    if name is None:
        return LANGUAGE
    folder = Path(name).expanduser()
    if folder.is_dir():
        if (folder / PIPELINE_FILE).is_file():
            return DIFFUSION
        return LANGUAGE
    if config.images.train is not None and config.data.train is None:
        return DIFFUSION
    return LANGUAGE


PICTURE_SUFFIXES = (
    ".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif", ".heic", ".heif", ".hif",
)  # fmt: skip
"""Of files that are pictures. Which of the last four are read depends on what is installed."""


def kind_for(model: str, data: str) -> str:
    """The kind of run that a new file is written for: by the model's folder, or by a folder of
    pictures as the data.
    """
    folder = Path(model).expanduser()
    pictures = Path(data).expanduser()
    if folder.is_dir():
        if (folder / PIPELINE_FILE).is_file():
            return DIFFUSION
        return LANGUAGE
    found = pictures.is_dir() and any(
        path.suffix.lower() in PICTURE_SUFFIXES for path in pictures.iterdir()
    )
    return DIFFUSION if found else LANGUAGE


def is_denoiser(given: dict[str, Any] | str | None) -> bool:
    """Whether a `model.config`, or the JSON file that it names, is a diffusers model's: those have
    `_class_name`.
    """
    if isinstance(given, str):
        try:
            file = config_file(given)
            return _names_a_class(file, file.stat().st_mtime_ns)
        except (OSError, ValueError):
            return False
    return isinstance(given, dict) and "_class_name" in given


@lru_cache
def _names_a_class(file: Path, _changed: int) -> bool:
    """`is_denoiser` of a file, which is read once for each time of its last change."""
    given = json.loads(file.read_text(encoding="utf-8"))
    return isinstance(given, dict) and "_class_name" in given


def applies(key: str, kind: str) -> bool:
    """Whether a run of this kind has the key."""
    return not any(_among(key, keys) for other, keys in ONLY.items() if other != kind)


def refuse_inapplicable(config: RunConfig, sources: Mapping[str, str]) -> None:
    """Raises  UsageError with a line for each key that was set and that this kind of run does not
    have.
    """
    kind = kind_of(config)
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
    for key, where in sources.items():
        if where == "default":
            continue
        if applies(key, kind):
            section, _, name = key.partition(".")
            if section == "distil" and objective != "distil":
                lines.append(
                    f"{where} {key}: does not apply to train.objective: {objective}, but to distil"
                )
            if key == "train.embedding_noise" and objective != "sft":
                lines.append(
                    f"{where} {key}: does not apply to train.objective: {objective}, but to sft"
                )
            if section == "preference" and name not in OBJECTIVES[objective]:
                whose = [one for one, its in OBJECTIVES.items() if name in its]
                lines.append(
                    f"{where} {key}: does not apply to train.objective: {objective}, but to"
                    f" {', '.join(whose)}"
                )
            continue
        also = {v: k for k, v in INSTEAD.items()} if kind == LANGUAGE else INSTEAD
        hint = f"; here it is {also[key]}" if key in also else ""
        lines.append(f"{where} {key}: does not apply to a {kind} run ({config.model.name}){hint}")
    if lines:
        raise UsageError("\n".join(lines))


def _among(key: str, keys: tuple[str, ...]) -> bool:
    return any(key.startswith(one) if one.endswith(".") else key == one for one in keys)
