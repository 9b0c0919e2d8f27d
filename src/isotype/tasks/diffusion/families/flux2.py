"""Flux.2 and Klein: latents of 2 x 2 in one as tokens, three layers of a language model side by side as text, four positions a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .family import Asked, Family
from .flux import told_guidance
from .latents import Patched, patched


class Flux2(Family):
    pipeline = "Flux2Pipeline"
    time_scale = 1000.0
    downscale = 1
    max_text_length = 512
    encoders = ("text_encoder", "tokenizer")
    latents = Patched()

    def text_shapes(self, config: Mapping[str, Any], length: int) -> dict[str, tuple[int, ...]]:
        return {"text": (length, int(config["joint_attention_dim"]))}

    def encode_text(self, pipe: Any, captions: list[str], *, max_length: int) -> dict[str, Tensor]:
        text_NSD, _ = pipe.encode_prompt(captions, max_sequence_length=max_length)
        return {"text": text_NSD}

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        height, width = noisy_NCHW.shape[-2:]
        told = torch.full_like(time_N, asked.guidance) if told_guidance(model) else None
        words_S4 = torch.zeros(text["text"].shape[1], 4, device=noisy_NCHW.device)
        words_S4[:, 3] = torch.arange(len(words_S4), device=noisy_NCHW.device)
        made_NTC = model(
            hidden_states=noisy_NCHW.flatten(2).transpose(1, 2), timestep=time_N, guidance=told, encoder_hidden_states=text["text"],
            txt_ids=words_S4, img_ids=positions(height, width, noisy_NCHW.device), return_dict=False,
        )[0]  # fmt: skip
        made: Tensor = made_NTC.transpose(1, 2).unflatten(2, (height, width))
        return made

    def sample(
        self, pipe: Any, text: dict[str, Tensor], empty: dict[str, Tensor], *, size: int, steps: int, guidance: float, generator: Any
    ) -> Tensor:
        made_NCHW = pipe(
            prompt_embeds=text["text"], height=size, width=size, num_inference_steps=steps, guidance_scale=guidance,
            generator=generator, output_type="latent", **self.guided_from(empty),
        ).images  # fmt: skip
        return self.latents.normalised(pipe.vae, patched(made_NCHW))

    def guided_from(self, empty: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the pipeline guides away from; nothing where the guidance is an input of the model."""
        return {}


class Flux2Klein(Flux2):
    pipeline = "Flux2KleinPipeline"

    def guided_from(self, empty: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"negative_prompt_embeds": empty["text"]}


def positions(rows: int, columns: int, device: torch.device) -> Tensor:
    """fp32[rows*columns 4]: 0, row, column and 0 of each token."""
    ids = torch.zeros(rows, columns, 4, device=device)
    ids[..., 1] = torch.arange(rows, device=device)[:, None]
    ids[..., 2] = torch.arange(columns, device=device)[None]
    return ids.reshape(-1, 4)
