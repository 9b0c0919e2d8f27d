"""Sana: latents of 32 x 32 pixels as pictures, a language model's sequence with its mask, linear attention."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .family import Asked, Family, config_of, masked_prompts
from .latents import Deterministic


class Sana(Family):
    pipeline = "SanaPipeline"
    downscale = 1
    max_text_length = 300
    encoders = ("text_encoder", "tokenizer")
    latents = Deterministic()
    not_in_comfyui = "ComfyUI itself has no Sana"
    adapted = ("SanaTransformerBlock",)

    def text_shapes(self, config: Mapping[str, Any], length: int) -> dict[str, tuple[int, ...]]:
        return {"text": (length, int(config["caption_channels"])), "mask": (length,)}

    def encode_text(self, pipe: Any, captions: list[str], *, max_length: int) -> dict[str, Tensor]:
        """A caption is encoded behind the instruction that the pipeline draws with; the empty one, which is guided away from, alone."""
        instruction = inspect.signature(type(pipe).__call__).parameters["complex_human_instruction"].default
        texts, masks = [], []
        for caption in captions:
            text_1SD, mask_1S, _, _ = pipe.encode_prompt(
                [caption], do_classifier_free_guidance=False, max_sequence_length=max_length,
                complex_human_instruction=instruction if caption else None,
            )  # fmt: skip
            texts.append(text_1SD)
            masks.append(mask_1S.to(text_1SD.dtype))
        return {"text": torch.cat(texts), "mask": torch.cat(masks)}

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        made: Tensor = model(
            noisy_NCHW, encoder_hidden_states=text["text"], encoder_attention_mask=text["mask"],
            timestep=time_N * 1000 * config_of(model).timestep_scale, return_dict=False,
        )[0]  # fmt: skip
        return made

    def sample(
        self, pipe: Any, text: dict[str, Tensor], empty: dict[str, Tensor], *, size: int, steps: int, guidance: float, generator: Any
    ) -> Tensor:
        made: Tensor = pipe(
            negative_prompt=None, **masked_prompts(text, empty), height=size, width=size, num_inference_steps=steps,
            guidance_scale=guidance, generator=generator, output_type="latent", use_resolution_binning=False,
        ).images  # fmt: skip
        return made
