"""Stable Diffusion XL: a U-Net on latents, two CLIP encoders side by side, the picture's size as further input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .family import Asked, PooledTextFamily


class SDXL(PooledTextFamily):
    pipeline = "StableDiffusionXLPipeline"
    denoiser = "unet"
    objectives = ("epsilon", "v")
    downscale = 4
    max_text_length = None
    encoders = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    adapted = ("Transformer2DModel",)

    def text_tokens(self, clip_length: int, max_length: int) -> int:
        return clip_length

    def text_shapes(self, config: Mapping[str, Any], length: int) -> dict[str, tuple[int, ...]]:
        width = int(config["projection_class_embeddings_input_dim"]) - 6 * int(config["addition_time_embed_dim"])
        return {"text": (length, int(config["cross_attention_dim"])), "pooled": (width,)}

    def encode_text(self, pipe: Any, captions: list[str], *, max_length: int) -> dict[str, Tensor]:
        text_NSD, _, pooled_ND, _ = pipe.encode_prompt(captions, do_classifier_free_guidance=False)
        if pipe.config.force_zeros_for_empty_prompt:  # the pipeline guides away from zeros: a dropped caption is the same
            captioned = torch.tensor([caption != "" for caption in captions], device=text_NSD.device)
            text_NSD, pooled_ND = text_NSD * captioned[:, None, None], pooled_ND * captioned[:, None]
        return {"text": text_NSD, "pooled": pooled_ND}

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        made: Tensor = model(
            noisy_NCHW, time_N, encoder_hidden_states=text["text"], return_dict=False,
            added_cond_kwargs={"text_embeds": text["pooled"], "time_ids": sizes(noisy_NCHW, asked.downscale)},
        )[0]  # fmt: skip
        return made


def sizes(noisy_NCHW: Tensor, downscale: int) -> Tensor:
    """fp32[N 6]: original height and width, top and left of the crop, target height and width, in pixels. The picture counts as uncropped,
    in its training size: what the pipeline tells by default when it draws."""
    height, width = (side * downscale for side in noisy_NCHW.shape[-2:])
    told = torch.tensor([height, width, 0, 0, height, width], dtype=torch.float32, device=noisy_NCHW.device)
    return told.repeat(len(noisy_NCHW), 1)
