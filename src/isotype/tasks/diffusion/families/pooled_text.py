"""Families whose pipeline takes a text as a sequence and as one pooled vector, and guides away from an empty text."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .family import Family


class PooledTextFamily(Family):
    def sample(
        self, pipe: Any, text: dict[str, Tensor], empty: dict[str, Tensor], *, size: int, steps: int, guidance: float, generator: Any
    ) -> Tensor:
        made: Tensor = pipe(
            prompt_embeds=text["text"], pooled_prompt_embeds=text["pooled"], negative_prompt_embeds=empty["text"],
            negative_pooled_prompt_embeds=empty["pooled"], height=size, width=size, num_inference_steps=steps, guidance_scale=guidance,
            generator=generator, output_type="latent",
        ).images  # fmt: skip
        return made
