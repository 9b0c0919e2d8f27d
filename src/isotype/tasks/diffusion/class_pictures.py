"""Generates the class pictures of a run with its base model, for the setting `draw` of
`images.regularisation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .denoiser import load_for_samples
from .picture_sizes import Size
from .pictures import MissingPicture, write_class_pictures
from .resolved_run import ResolvedRun
from .sample import Prompt, sample

# returns each prompt with the outputs of the text encoders for it and for its negative prompt
EncodePrompts = Callable[
    [Sequence[Prompt]], Sequence[tuple[Prompt, dict[str, Tensor], dict[str, Tensor]]]
]


def class_picture_facts(run: ResolvedRun) -> dict[str, Any]:
    """Returns the settings that determine what the class pictures look like, except for their
    caption. If the model is a local folder or file, its full path is given.
    """
    settings = run.sample_settings
    name = str(run.config.model.name)
    path = Path(name).expanduser()
    return {
        "model": str(path.resolve()) if path.exists() else name,
        "steps": settings.steps,
        "guidance": settings.guidance,
        "seed": settings.seed,
    }


def draw_class_pictures(
    run: ResolvedRun,
    missing: Sequence[MissingPicture],
    device: torch.device,
    encode_prompts: EncodePrompts,
) -> None:
    """Generates the missing class pictures with the base model. It uses the run's precision and the
    run's settings for samples. The model is freed when this function returns, so that it is not in
    memory while the caller encodes the pictures.
    """
    config = run.config
    settings = run.sample_settings
    model = load_for_samples(run.folder, config, run.precision, device)
    prompts = []
    for picture in missing:
        size = picture.size or config.images.resolution
        overrides = {"seed": settings.seed + picture.number, "size": Size(size, size)}
        prompts.append(Prompt(picture.caption, overrides=overrides))
    samples = sample(
        model, run.folder, config, run.precision, encode_prompts(prompts), settings, device
    )
    write_class_pictures(missing, class_picture_facts(run), (drawn.content for drawn in samples))
