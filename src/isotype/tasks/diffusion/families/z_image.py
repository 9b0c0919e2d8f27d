"""Z-Image: each picture and each caption is a sequence of its own length; the velocity points from noise to the latent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .family import Asked, Family


class ZImage(Family):
    pipeline = "ZImagePipeline"
    max_text_length = 512
    encoders = ("text_encoder", "tokenizer")
    own_lengths = True

    def text_shapes(self, config: Mapping[str, Any], length: int) -> dict[str, tuple[int, ...]]:
        return {"text": (length, int(config["cap_feat_dim"])), "mask": (length,)}

    def encode_text(self, pipe: Any, captions: list[str], *, max_length: int) -> dict[str, list[Tensor]]:
        # the pipeline writes into the list that it is given
        texts, _ = pipe.encode_prompt(list(captions), do_classifier_free_guidance=False, max_sequence_length=max_length)
        return {"text": list(texts)}

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        texts = [one[:length] for one, length in zip(text["text"], asked.lengths)]
        made = model(list(noisy_NCHW[:, :, None].unbind(0)), 1 - time_N, texts, return_dict=False)[0]
        return -torch.stack([one[:, 0] for one in made])

    def sample(
        self, pipe: Any, text: dict[str, Tensor], empty: dict[str, Tensor], *, size: int, steps: int, guidance: float, generator: Any
    ) -> Tensor:
        made: Tensor = pipe(
            prompt_embeds=list(text["text"]), negative_prompt_embeds=list(empty["text"]), height=size, width=size,
            num_inference_steps=steps, guidance_scale=guidance, generator=generator, output_type="latent",
        ).images  # fmt: skip
        return made
