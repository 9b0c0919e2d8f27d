"""Sana: latents as pictures, a decoder language model's sequence with its mask, linear attention.

Only the denoiser so far: its pipeline (DC-AE and Gemma) is not offered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .family import Asked, Family


class Sana(Family):
    pipeline = "SanaPipeline"
    downscale = 1
    max_text_length = 300
    encoders = ("text_encoder", "tokenizer")
    adapted = ("SanaTransformerBlock",)

    def text_shapes(self, config: Mapping[str, Any], length: int) -> dict[str, tuple[int, ...]]:
        return {"text": (length, int(config["caption_channels"])), "mask": (length,)}

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        made: Tensor = model(
            noisy_NCHW, encoder_hidden_states=text["text"], encoder_attention_mask=text["mask"], timestep=time_N * 1000, return_dict=False
        )[0]
        return made
