"""Qwen-Image: latents in tokens of 2 x 2, the sequence of a vision language model, guidance away from an empty text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .family import Asked, Family
from .flux import packed, unpacked
from .latents import OfAVideo


class QwenImage(Family):
    pipeline = "QwenImagePipeline"
    time_scale = 1.0  # its sinusoidal embedding multiplies by 1000 itself
    max_text_length = 1024
    encoders = ("text_encoder", "tokenizer")
    latents = OfAVideo()
    own_lengths = True

    def unused(self, denoiser: Any) -> tuple[str, ...]:
        """What the last block makes of the text, which is not used."""
        last = f"transformer_blocks.{len(denoiser.transformer_blocks) - 1}"
        return (f"{last}.attn.add_q_proj", f"{last}.attn.to_add_out", f"{last}.txt_mlp")

    def text_shapes(self, config: Mapping[str, Any], length: int) -> dict[str, tuple[int, ...]]:
        return {"text": (length, int(config["joint_attention_dim"])), "mask": (length,)}

    def encode_text(self, pipe: Any, captions: list[str], *, max_length: int) -> dict[str, list[Tensor]]:
        text_NSD, mask_NS = pipe.encode_prompt(captions, max_sequence_length=max_length)
        return {"text": [text if mask_NS is None else text[mask_NS[i].bool()] for i, text in enumerate(text_NSD)]}

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        height, width = noisy_NCHW.shape[-2:]
        made_NTC = model(
            hidden_states=packed(noisy_NCHW), timestep=time_N, encoder_hidden_states=text["text"],
            encoder_hidden_states_mask=text["mask"].bool(), img_shapes=[[(1, height // 2, width // 2)]] * len(noisy_NCHW),
            return_dict=False,
        )[0]  # fmt: skip
        return unpacked(made_NTC, height, width)

    def sample(
        self, pipe: Any, text: dict[str, Tensor], empty: dict[str, Tensor], *, size: int, steps: int, guidance: float, generator: Any
    ) -> Tensor:
        made_NTC = pipe(
            prompt_embeds=text["text"], prompt_embeds_mask=_all(text), negative_prompt_embeds=empty["text"],
            negative_prompt_embeds_mask=_all(empty), height=size, width=size, num_inference_steps=steps, true_cfg_scale=guidance,
            generator=generator, output_type="latent",
        ).images  # fmt: skip
        side = size // pipe.vae_scale_factor
        return unpacked(made_NTC, side, side)


def _all(text: dict[str, Tensor]) -> Tensor:
    """bool[N S]: every token counts, of a caption in its own length."""
    return text["text"].new_ones(text["text"].shape[:2]).bool()
