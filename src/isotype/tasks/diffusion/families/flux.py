"""Flux.1: latents in tokens of 2 x 2, CLIP's pooled text and T5's sequence, guidance as an input number of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .family import Asked, Family, config_of


class Flux(Family):
    pipeline = "FluxPipeline"
    time_scale = 1000.0
    max_text_length = 512
    encoders = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")

    def encode_text(self, pipe: Any, captions: list[str], *, max_length: int) -> dict[str, Tensor]:
        text_NSD, pooled_ND, _ = pipe.encode_prompt(captions, max_sequence_length=max_length)
        return {"text": text_NSD, "pooled": pooled_ND}

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        height, width = noisy_NCHW.shape[-2:]
        told = torch.full_like(time_N, asked.guidance) if told_guidance(model) else None
        made_NTC = model(
            hidden_states=packed(noisy_NCHW), timestep=time_N, guidance=told, encoder_hidden_states=text["text"],
            pooled_projections=text["pooled"], txt_ids=torch.zeros(text["text"].shape[1], 3, device=noisy_NCHW.device),
            img_ids=positions(height // 2, width // 2, noisy_NCHW.device), return_dict=False,
        )[0]  # fmt: skip
        return unpacked(made_NTC, height, width)

    def sample(
        self, pipe: Any, text: dict[str, Tensor], empty: dict[str, Tensor], *, size: int, steps: int, guidance: float, generator: Any
    ) -> Tensor:
        made_NTC = pipe(
            prompt_embeds=text["text"], pooled_prompt_embeds=text["pooled"], height=size, width=size, num_inference_steps=steps,
            guidance_scale=guidance, generator=generator, output_type="latent",
        ).images  # fmt: skip
        side = size // pipe.vae_scale_factor
        return unpacked(made_NTC, side, side)


def told_guidance(model: Any) -> bool:
    """Whether this model has an input for the guidance scale (Flux.1-dev), or none (schnell)."""
    return bool(config_of(model).guidance_embeds)


def packed(latents_NCHW: Tensor) -> Tensor:
    """F[N C H W] -> F[N HW/4 4C]: each token holds 2 x 2 latent pixels, channel first."""
    n, c, h, w = latents_NCHW.shape
    return latents_NCHW.reshape(n, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(n, h * w // 4, 4 * c)


def unpacked(tokens_NTC: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `packed`, to latents of `height` x `width`."""
    n, _, c = tokens_NTC.shape
    return tokens_NTC.reshape(n, height // 2, width // 2, c // 4, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(n, c // 4, height, width)


def positions(rows: int, columns: int, device: torch.device) -> Tensor:
    """fp32[rows*columns 3]: 0, row and column of each token."""
    ids = torch.zeros(rows, columns, 3, device=device)
    ids[..., 1] = torch.arange(rows, device=device)[:, None]
    ids[..., 2] = torch.arange(columns, device=device)[None]
    return ids.reshape(-1, 3)
