"""Stable Diffusion 1.5 and 2: a U-Net on latents, one CLIP encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .family import Asked, Family


class StableDiffusion(Family):
    pipeline = "StableDiffusionPipeline"
    denoiser = "unet"
    objectives = ("epsilon", "v")
    downscale = 8
    max_text_length = None
    encoders = ("text_encoder", "tokenizer")
    not_needed = ("safety_checker", "feature_extractor", "image_encoder")
    adapted = ("Transformer2DModel",)

    def text_tokens(self, clip_length: int, max_length: int) -> int:
        return clip_length

    def text_shapes(self, config: Mapping[str, Any], length: int) -> dict[str, tuple[int, ...]]:
        return {"text": (length, int(config["cross_attention_dim"]))}

    def encode_text(self, pipe: Any, captions: list[str], *, max_length: int) -> dict[str, Tensor]:
        text_NSD, _ = pipe.encode_prompt(captions, pipe._execution_device, 1, do_classifier_free_guidance=False)
        return {"text": text_NSD}

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        made: Tensor = model(noisy_NCHW, time_N, encoder_hidden_states=text["text"], return_dict=False)[0]
        return made

    def sample(
        self, pipe: Any, text: dict[str, Tensor], empty: dict[str, Tensor], *, size: int, steps: int, guidance: float, generator: Any
    ) -> Tensor:
        made: Tensor = pipe(
            prompt_embeds=text["text"], negative_prompt_embeds=empty["text"], height=size, width=size, num_inference_steps=steps,
            guidance_scale=guidance, generator=generator, output_type="latent",
        ).images  # fmt: skip
        return made
