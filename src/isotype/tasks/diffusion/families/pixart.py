"""PixArt-alpha and PixArt-Sigma: latents as pictures, T5's sequence with its mask, a predicted variance that training does not use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .family import Asked, Family, config_of, masked_prompts


class PixArtAlpha(Family):
    pipeline = "PixArtAlphaPipeline"
    objectives = ("epsilon", "v")
    max_text_length = 120
    encoders = ("text_encoder", "tokenizer")
    loads_lora = False
    adapted = ("BasicTransformerBlock",)

    def text_shapes(self, config: Mapping[str, Any], length: int) -> dict[str, tuple[int, ...]]:
        return {"text": (length, int(config["caption_channels"])), "mask": (length,)}

    def encode_text(self, pipe: Any, captions: list[str], *, max_length: int) -> dict[str, Tensor]:
        text_NSD, mask_NS, _, _ = pipe.encode_prompt(captions, do_classifier_free_guidance=False, max_sequence_length=max_length)
        return {"text": text_NSD, "mask": mask_NS.to(text_NSD.dtype)}

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        made: Tensor = model(
            noisy_NCHW, encoder_hidden_states=text["text"], encoder_attention_mask=text["mask"], timestep=time_N,
            added_cond_kwargs=told_size(model, noisy_NCHW, asked.downscale), return_dict=False,
        )[0]  # fmt: skip
        return made[:, : noisy_NCHW.shape[1]]  # the rest is the variance

    def sample(
        self, pipe: Any, text: dict[str, Tensor], empty: dict[str, Tensor], *, size: int, steps: int, guidance: float, generator: Any
    ) -> Tensor:
        made: Tensor = pipe(
            negative_prompt=None, **masked_prompts(text, empty), height=size, width=size, num_inference_steps=steps,
            guidance_scale=guidance, generator=generator, output_type="latent", use_resolution_binning=False,
        ).images  # fmt: skip
        return made


class PixArtSigma(PixArtAlpha):
    pipeline = "PixArtSigmaPipeline"
    max_text_length = 300


def told_size(model: Any, noisy_NCHW: Tensor, downscale: int) -> dict[str, Tensor | None]:
    """Height and width in pixels and their ratio, fp32[N 2] and fp32[N 1], for a model that takes them as inputs (alpha at 1024 pixels)."""
    told = config_of(model)
    if not (told.sample_size == 128 if told.use_additional_conditions is None else told.use_additional_conditions):
        return {"resolution": None, "aspect_ratio": None}
    n, _, height, width = noisy_NCHW.shape
    size = torch.tensor([height * downscale, width * downscale], dtype=torch.float32, device=noisy_NCHW.device)
    return {"resolution": size.repeat(n, 1), "aspect_ratio": (size[:1] / size[1:]).repeat(n, 1)}
