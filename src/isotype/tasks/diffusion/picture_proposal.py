"""Proposes the settings of a run on pictures for `isotype init`: a resolution that fits the model and
the pictures, and the number of steps of a LoRA. Imports no torch.

Without these settings, a run with the defaults of the schema uses each picture once, in steps of 4:
a folder of 19 pictures gives 5 steps, and a LoRA that has learnt nothing.

Source  `--max_train_steps` of kohya's sd-scripts is 1,600 by default, with one picture a step; the
        examples of ai-toolkit have 2,000 steps of one picture, with a learning rate of 1e-4.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ...config.kind import DIFFUSION, PIPELINE_FILE, guess_run_kind
from ...data.pictures import BadPicture, register_phone_formats
from ...precision.safetensors_header import read_safetensors_header
from .clip_proposal import SettingsProposal, read_json
from .picture_files import list_files, read_captions, readable_pictures

LORA_STEPS = 2000  # of one picture
LORA_RATE = 1e-4
ADAPTERS = 4  # adapters and rounds of samples in a run
DEFAULT_SIDE = 1024
SIDE_MULTIPLE = 64
MAX_ASPECT = 2.0
MAX_MEASURED = 200  # pictures
_OF_512 = re.compile(r"stable-diffusion-v?1|sd-?v?1[.-]|sd-?15", re.IGNORECASE)
# beginning of a tensor's name in a checkpoint in one file -> the side of its pictures
_SIDES_OF_ENCODERS = {"cond_stage_model.transformer.": 512, "cond_stage_model.model.": 768}


def propose_picture_settings(model: str, data: str, *, is_lora: bool) -> SettingsProposal | None:
    """Returns the settings for a folder of pictures. Returns None if the folder contains no
    pictures, or if the model does not generate any.

    is_lora  whether the run trains a LoRA: the steps of other runs are not proposed
    """
    folder = Path(data).expanduser()
    if not folder.is_dir() or guess_run_kind(model, data) != DIFFUSION:
        return None
    pictures = readable_pictures(list_files(folder))
    if not pictures:
        return None
    side, reason = _choose_resolution(_native_side(model), _picture_sides(pictures))
    settings: dict[str, Any] = {"images.resolution": side, "images.max_aspect": MAX_ASPECT}
    reasons = [reason]
    if is_lora:
        steps = max(LORA_STEPS, len(pictures))
        settings |= {
            "train.steps": steps,
            "train.batch_size": 1,
            "train.learning_rate": LORA_RATE,
            "run.adapters_every": math.ceil(steps / ADAPTERS),
        }
        reasons.append(
            f"train.steps: {steps} of one picture, {steps / len(pictures):.3g} for each of"
            f" {len(pictures)} pictures: compare the samples and the LoRAs of every"
            f" {settings['run.adapters_every']} steps"
        )
    caption = _first_caption(pictures)
    if caption:
        settings["run.samples"] = [caption]
        reasons.append("run.samples: the first caption; add prompts of your own")
    return SettingsProposal(settings, reasons)


def _native_side(model: str) -> int:
    """Returns the side of the square pictures for which a model was trained. It is guessed from the
    name of a model on the hub.
    """
    path = Path(model).expanduser()
    folder = path.with_suffix("") if path.is_file() else path
    if read_json(folder / PIPELINE_FILE):
        size = read_json(folder / "unet/config.json").get("sample_size")
        # the VAE of Stable Diffusion and SDXL scales by 8
        return 8 * size if isinstance(size, int) else DEFAULT_SIDE
    if path.is_file():
        try:
            names = read_safetensors_header(path).tensors
        except (OSError, ValueError):
            return DEFAULT_SIDE
        for beginning, side in _SIDES_OF_ENCODERS.items():
            if any(name.startswith(beginning) for name in names):
                return side
        return DEFAULT_SIDE
    return 512 if _OF_512.search(model) else DEFAULT_SIDE


def _picture_sides(pictures: Sequence[Path]) -> list[int]:
    """Returns the side of the square with as many pixels, for the first pictures that can be read.
    Only the headers of the files are read.
    """
    from PIL import Image

    register_phone_formats()
    sides = []
    for path in pictures[:MAX_MEASURED]:
        try:
            with Image.open(path) as image:
                sides.append(math.isqrt(image.width * image.height))
        except (OSError, ValueError, Image.DecompressionBombError):
            continue
    return sides


def _choose_resolution(native: int, sides: Sequence[int]) -> tuple[int, str]:
    """Returns the model's resolution, or a smaller one if most of the pictures have fewer pixels."""
    typical = int(median(sides)) if sides else native
    side = min(native, max(SIDE_MULTIPLE, typical // SIDE_MULTIPLE * SIDE_MULTIPLE))
    reason = f"images.resolution: {side}"
    if side < native:
        reason += f": most pictures have fewer pixels than {native} x {native}, the model's size"
    smaller = sum(size < side for size in sides)
    if smaller:
        reason += f"; {smaller} of {len(sides)} pictures have fewer pixels and are enlarged"
    return side, reason


def _first_caption(pictures: Sequence[Path]) -> str | None:
    for path in pictures:
        try:
            captions = read_captions(path.with_suffix(""))
        except (BadPicture, OSError):
            continue
        if captions[0]:
            return captions[0]
    return None
