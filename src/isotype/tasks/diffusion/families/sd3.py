"""Stable Diffusion 3 and 3.5: latents as pictures, two CLIP encoders and T5 in one sequence, classifier-free guidance."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .family import Asked, PooledTextFamily


class SD3(PooledTextFamily):
    pipeline = "StableDiffusion3Pipeline"
    max_text_length = 256
    encoders = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")

    def unused(self, denoiser: Any) -> tuple[str, ...]:
        """The text's queries of the last block, whose text is not used."""
        return tuple(f"transformer_blocks.{i}.attn.add_q_proj" for i, b in enumerate(denoiser.transformer_blocks) if b.context_pre_only)

    def text_tokens(self, clip_length: int, max_length: int) -> int:
        return clip_length + max_length

    def encode_text(self, pipe: Any, captions: list[str], *, max_length: int) -> dict[str, Tensor]:
        text_NSD, _, pooled_ND, _ = pipe.encode_prompt(
            captions, None, None, do_classifier_free_guidance=False, max_sequence_length=max_length
        )
        return {"text": text_NSD, "pooled": pooled_ND}

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        made: Tensor = model(
            hidden_states=noisy_NCHW, timestep=time_N * 1000, encoder_hidden_states=text["text"], pooled_projections=text["pooled"],
            return_dict=False,
        )[0]  # fmt: skip
        return made
