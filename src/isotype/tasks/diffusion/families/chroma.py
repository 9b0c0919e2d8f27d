"""Chroma: Flux without CLIP, whose text is masked behind its first padding token, and that guides away from an empty text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .family import Asked, Family, masked_prompts
from .flux import packed, positions, unpacked


class Chroma(Family):
    pipeline = "ChromaPipeline"
    time_scale = 1000.0
    max_text_length = 512
    encoders = ("text_encoder", "tokenizer")
    not_needed = ("image_encoder", "feature_extractor")

    def text_shapes(self, config: Mapping[str, Any], length: int) -> dict[str, tuple[int, ...]]:
        return {"text": (length, int(config["joint_attention_dim"])), "mask": (length,)}

    def encode_text(self, pipe: Any, captions: list[str], *, max_length: int) -> dict[str, Tensor]:
        text_NSD, _, mask_NS, *_ = pipe.encode_prompt(captions, do_classifier_free_guidance=False, max_sequence_length=max_length)
        return {"text": text_NSD, "mask": mask_NS}

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        height, width = noisy_NCHW.shape[-2:]
        tokens_NTC = packed(noisy_NCHW)
        mask_NS = text["mask"].to(tokens_NTC.dtype)  # of numbers, which attention adds, as in the pipeline
        made_NTC = model(
            hidden_states=tokens_NTC, timestep=time_N, encoder_hidden_states=text["text"],
            txt_ids=torch.zeros(text["text"].shape[1], 3, device=noisy_NCHW.device),
            img_ids=positions(height // 2, width // 2, noisy_NCHW.device),
            attention_mask=torch.cat((mask_NS, mask_NS.new_ones(tokens_NTC.shape[:2])), 1), return_dict=False,
        )[0]  # fmt: skip
        return unpacked(made_NTC, height, width)

    def sample(
        self, pipe: Any, text: dict[str, Tensor], empty: dict[str, Tensor], *, size: int, steps: int, guidance: float, generator: Any
    ) -> Tensor:
        made_NTC = pipe(
            **masked_prompts(text, empty), height=size, width=size, num_inference_steps=steps, guidance_scale=guidance,
            generator=generator, output_type="latent",
        ).images  # fmt: skip
        side = size // pipe.vae_scale_factor
        return unpacked(made_NTC, side, side)
