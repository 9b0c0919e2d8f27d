"""Contains the model family LongCat-Image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..picture_sizes import Size
from .family import Conditioning, Denoiser, SampleSettings, Text
from .flow import PackedTokens, pack_latents, position_ids, unpack_latents


class LongCatImage(PackedTokens):
    """LongCat-Image. The denoiser gets the text embeddings of a vision-language model, padded to a
    fixed length. The row and column ids of the picture's tokens start at this length, not at 0.
    """

    pipeline = "LongCatImagePipeline"
    exact_time_scale = 1000.0
    max_text_length = 512
    unneeded_parts = ("text_processor",)
    loads_lora = False
    block_classes = ("LongCatImageTransformerBlock", "LongCatImageSingleTransformerBlock")

    def encode_text(
        self, pipe: Any, captions: list[str], *, max_length: int, **options: Any
    ) -> Mapping[str, Tensor]:
        pipe.tokenizer_max_length = max_length
        return {"text": pipe.encode_prompt(captions)[0]}

    def predict(
        self,
        model: Denoiser,
        noisy_NCHW: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> Tensor:
        height, width = noisy_NCHW.shape[-2:]
        length = text["text"].shape[1]
        ids_T3 = position_ids(height // 2, width // 2, noisy_NCHW.device)
        ids_T3 += ids_T3.new_tensor([1, length, length])
        output_NTC = model(
            hidden_states=pack_latents(noisy_NCHW),
            timestep=time_N,
            encoder_hidden_states=text["text"],
            txt_ids=_text_ids(length, noisy_NCHW.device),
            img_ids=ids_T3,
            return_dict=False,
        )[0]
        return unpack_latents(output_NTC, height, width)

    def extra_arguments(
        self, pipe: Any, size: Size, controls: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        return {"enable_prompt_rewrite": False}

    def sample(
        self,
        pipe: Any,
        text: Text,
        empty: Text,
        settings: SampleSettings,
        generator: Any,
        controls: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """Generates latents with the pipeline. Its `encode_prompt` fails if it gets embeddings instead
        of a prompt, so it is replaced by a function that returns the embeddings.
        """
        length = text["text"].shape[1]
        text_ids_S3 = _text_ids(length, text["text"].device)
        pipe.tokenizer_max_length = length
        pipe.encode_prompt = lambda *, prompt_embeds, **_: (prompt_embeds, text_ids_S3)
        return super().sample(pipe, text, empty, settings, generator, controls)


def _text_ids(length: int, device: torch.device) -> Tensor:
    """Returns the position ids of the text, fp32[S 3]. The three ids of the token at position s are
    0, s and s.
    """
    ids_S3 = torch.arange(length, device=device).float()[:, None].repeat(1, 3)
    ids_S3[:, 0] = 0
    return ids_S3
