"""Contains the model families that generate videos. A picture is a video with one frame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..pixels import Size
from .family import (
    MASK_ARGUMENTS,
    Conditioning,
    Config,
    Denoiser,
    Family,
    Text,
    VideoLatents,
    latents_to_tokens,
    tokens_to_latents,
)


class WanLatents(VideoLatents):
    """The latents of Wan's VAE."""

    vae = "AutoencoderKLWan"

    def downscale(self, config: Config) -> int:
        return int(config.get("scale_factor_spatial") or 8)


class SingleFrame(Family):
    """A family for videos that is used to generate a single frame."""

    def extra_arguments(self, pipe: Any, size: Size, control: Tensor | None) -> dict[str, Any]:
        return {"num_frames": 1}


class Wan(SingleFrame):
    """Supports Wan 2.1, and the model of Wan 2.2 that has only one denoiser. The denoiser gets
    UMT5's sequence of embeddings. The embeddings of padding tokens are 0.
    """

    pipeline = "WanPipeline"
    max_text_length = 512
    latents = WanLatents()
    text_width_key = "text_dim"
    comfyui_prefix = "diffusion_model"
    comfyui_names = {
        ".attn1.": ".self_attn.",
        ".attn2.": ".cross_attn.",
        ".to_q": ".q",
        ".to_k": ".k",
        ".to_v": ".v",
        ".to_out.0": ".o",
        ".ffn.net.0.proj": ".ffn.0",
        ".ffn.net.2": ".ffn.2",
    }

    def refusal(self, index: Mapping[str, Any]) -> str | None:
        if index.get("transformer_2", [None, None])[1] is None:
            return None
        return (
            "it has two denoisers, one for much noise and one for little: a run trains one (Wan"
            " 2.1, or 2.2 TI2V)"
        )

    def predict(
        self,
        model: Denoiser,
        noisy_NCHW: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> Tensor:
        return model(noisy_NCHW[:, :, None], time_N * 1000, text["text"], return_dict=False)[0][
            :, :, 0
        ]

    def output_latents(self, pipe: Any, output: Tensor, size: Size) -> Tensor:
        return output[:, :, 0]


class LTXLatents(VideoLatents):
    """The latents of LTX's VAE. Its file contains the offset and the factor of each channel."""

    vae = "AutoencoderKLLTXVideo"

    def downscale(self, config: Config) -> int:
        ratio = config.get("spatial_compression_ratio")
        return int(ratio or config["patch_size"] * 2 ** sum(config["spatio_temporal_scaling"]))

    def channels(self, config: Config) -> int:
        return int(config["latent_channels"])

    def statistics(self, vae: Any, device: torch.device) -> tuple[Tensor, Tensor]:
        offset, deviation = (
            values.float()[:, None, None] for values in (vae.latents_mean, vae.latents_std)
        )
        return offset, deviation / vae.config.scaling_factor


class LTX(SingleFrame):
    """LTX-Video. A token is one latent pixel, and positions are measured in pixels. The denoiser
    gets T5's sequence of embeddings with its mask.
    """

    pipeline = "LTXPipeline"
    side_multiple = 1
    max_text_length = 128
    latents = LTXLatents()
    text_output_indices = {"text": 0, "mask": 1}
    text_width_key = "caption_channels"
    text_arguments = MASK_ARGUMENTS
    block_classes = ("LTXVideoTransformerBlock",)
    comfyui_prefix = "diffusion_model"

    def predict(
        self,
        model: Denoiser,
        noisy_NCHW: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> Tensor:
        height, width = noisy_NCHW.shape[-2:]
        output_NTC = model(
            latents_to_tokens(noisy_NCHW),
            text["text"],
            time_N * 1000,
            text["mask"],
            num_frames=1,
            height=height,
            width=width,
            rope_interpolation_scale=(1.0, conditioning.downscale, conditioning.downscale),
            return_dict=False,
        )[0]
        return tokens_to_latents(output_NTC, height, width)

    def output_latents(self, pipe: Any, output: Tensor, size: Size) -> Tensor:
        factor = pipe.vae_spatial_compression_ratio
        return tokens_to_latents(output, size.height // factor, size.width // factor)
