"""Contains the model family ERNIE-Image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..picture_sizes import Size
from .family import (
    Conditioning,
    Denoiser,
    Family,
    PatchedLatents,
    Text,
    replace_positions_in_plan,
)


class ErnieLatents(PatchedLatents):
    """Latents like those of Flux.2. Their normalisation adds the constant 1e-5 to the variance.
    Like the pipeline, it ignores the constant in the VAE's configuration.
    """

    def epsilon(self, vae: Any) -> float:
        return 1e-5


class ErnieImage(Family):
    """ERNIE-Image. The tokens of the picture come first, and the tokens of the text after them. The
    text embeddings are the outputs of the second-to-last layer of a language model.
    """

    pipeline = "ErnieImagePipeline"
    latent_side_multiple = 1
    max_text_length = 1024
    latents = ErnieLatents()
    keeps_text_lengths = True
    unneeded_parts = ("pe", "pe_tokenizer")
    text_width_key = "text_in_dim"
    block_classes = ("ErnieImageSharedAdaLNBlock",)

    def prepare(self, denoiser: Any) -> None:
        super().prepare(denoiser)
        weight = denoiser.final_linear.weight
        replace_positions_in_plan(denoiser.pos_embed, _empty_positions, weight)

    def encode_text(
        self, pipe: Any, captions: list[str], *, max_length: int, **options: Any
    ) -> Mapping[str, list[Tensor]]:
        pipe.tokenizer.model_max_length = max_length  # the only limit that the pipeline has
        return {"text": list(pipe.encode_prompt(captions, device=pipe.text_encoder.device))}

    def predict(
        self,
        model: Denoiser,
        noisy_NCHW: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> Tensor:
        lengths_N = torch.tensor(conditioning.lengths, device=noisy_NCHW.device)
        return model(
            hidden_states=noisy_NCHW,
            timestep=time_N * 1000,
            text_bth=text["text"],
            text_lens=lengths_N,
            return_dict=False,
        )[0]

    def text_inputs(self, text: Text, empty: Text) -> dict[str, Any]:
        return {name: list(values) for name, values in super().text_inputs(text, empty).items()}

    def extra_arguments(
        self, pipe: Any, size: Size, controls: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        return {"use_pe": False}


def _empty_positions(table: Any, ids_NT3: Tensor) -> Tensor:
    """Returns an empty table of positions with the shape and dtype of the original one."""
    return ids_NT3.new_empty(*ids_NT3.shape[:2], 1, sum(table.axes_dim)).float()
