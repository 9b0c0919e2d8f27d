"""Denoisers whose pipelines are not offered, as their VAEs and text encoders are other ones: part of the matrix of denoisers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from isotype.tasks.diffusion.families import Asked, Family


class Wan(Family):
    """Wan, for pictures: a video model on one frame, with T5's sequence."""

    pipeline = "WanPipeline"
    max_text_length = 512
    encoders = ("text_encoder", "tokenizer")

    def text_shapes(self, config: Mapping[str, Any], length: int) -> dict[str, tuple[int, ...]]:
        return {"text": (length, int(config["text_dim"]))}

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        made_NCFHW: Tensor = model(
            hidden_states=noisy_NCHW[:, :, None], timestep=time_N * 1000, encoder_hidden_states=text["text"], return_dict=False
        )[0]
        return made_NCFHW[:, :, 0]
