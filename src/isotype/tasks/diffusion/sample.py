"""Makes pictures during training, with the model's own pipeline, under the run's precision. They do not change training."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...distributed.world import ALONE, World
from ...dtypes import to_torch
from ...precision.apply import generating, inner_model
from ...precision.precision import Precision
from ...training.task import eval_mode, random_state_restored
from .batches import generator_of
from .encode import release
from .pipeline import PipelineFolder
from .pixels import as_png


@dataclass(frozen=True)
class Sample:
    """png  the picture's file"""

    prompt: str
    size: int
    png: bytes

    @property
    def file(self) -> tuple[str, bytes]:
        return ".png", self.png

    def as_json(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "answer": f"a picture of {self.size} x {self.size}", "reference": None}

    def lines(self) -> tuple[str, str]:
        return self.prompt, f"a picture of {self.size} x {self.size}"


@dataclass(frozen=True)
class Drawing:
    """How samples are drawn: side in pixels, denoising steps, guidance scale, seed."""

    size: int
    steps: int
    guidance: float
    seed: int


def sample(
    model: nn.Module,
    folder: PipelineFolder,
    precision: Precision,
    prompts: Sequence[tuple[str, dict[str, Tensor]]],
    empty: dict[str, Tensor],
    how: Drawing,
    device: torch.device,
    *,
    seconds: float = math.inf,
    world: World = ALONE,
) -> list[Sample]:
    """A picture a prompt. Its noise depends on the seed and the prompt's position only.

    prompts  each with its text embeddings; `empty`: those of the empty prompt
    seconds  no further picture is begun after so long; the first is always drawn
    world    the processes that share the model and call this together: all draw the same pictures
    """
    dtype = to_torch(precision.latents)
    samples = []
    with random_state_restored(), eval_mode(model), generating(model):
        vae = folder.vae(to_torch(precision.vae)).to(device).eval()
        pipe = folder.pipeline_for_sampling(inner_model(model), vae)
        # the pipeline takes its latents' dtype from the text's
        none = {name: tensor[None].to(device, dtype) for name, tensor in empty.items()}
        begun = time.monotonic()
        for i, (prompt, text) in enumerate(prompts):
            if i and world.any(time.monotonic() - begun > seconds):
                break
            given = {name: tensor[None].to(device, dtype) for name, tensor in text.items()}
            latents_1CHW = folder.family.sample(
                pipe, given, none, size=how.size, steps=how.steps, guidance=how.guidance, generator=generator_of("sample", how.seed, i)
            )
            picture_CHW = folder.family.latents.decode(vae, latents_1CHW)[0]
            samples.append(Sample(prompt, picture_CHW.shape[-1], as_png(picture_CHW.float())))
        del pipe, vae
    release(device)
    return samples
