"""Contains the model families that generate videos. They are trained on pictures or on clips. A
picture is a video with one frame.

In shapes, F is the number of frames of the denoiser's latents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..picture_sizes import Size
from .family import (
    MASK_ARGUMENTS,
    Conditioning,
    Config,
    Denoiser,
    Family,
    SampleSettings,
    Text,
    VideoLatents,
    as_video,
    latents_to_tokens,
    like_input,
)


class WanLatents(VideoLatents):
    """The latents of Wan's VAE."""

    vae = "AutoencoderKLWan"

    def downscale(self, config: Config) -> int:
        return int(config.get("scale_factor_spatial") or 8)

    def frame_step(self, config: Config) -> int:
        return int(config.get("scale_factor_temporal") or 4)


class VideoFamily(Family):
    """A family for videos. Pictures have latents F[N C H W], and clips have latents F[N C F H W]."""

    def predict(
        self,
        model: Denoiser,
        noisy: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> Tensor:
        output = self.predict_video(model, as_video(noisy), time_N, text, conditioning)
        return like_input(output, noisy)

    def predict_video(
        self,
        model: Denoiser,
        noisy_NCFHW: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> Tensor:
        """Returns the denoiser's prediction F[N C F H W]."""
        raise NotImplementedError

    def video_arguments(self, settings: SampleSettings) -> dict[str, Any]:
        return {"num_frames": settings.frames}

    def output_latents(self, pipe: Any, output: Tensor, size: Size) -> Tensor:
        latents_NCFHW = self.output_video(pipe, output, size)
        return latents_NCFHW[:, :, 0] if latents_NCFHW.shape[2] == 1 else latents_NCFHW

    def output_video(self, pipe: Any, output: Tensor, size: Size) -> Tensor:
        """Converts the pipeline's output to latents F[N C F H W]."""
        return output


class Wan(VideoFamily):
    """Supports Wan 2.1, and the model of Wan 2.2 that has only one denoiser. The denoiser gets
    UMT5's sequence of embeddings. The embeddings of padding tokens are 0.
    """

    pipeline = "WanPipeline"
    max_text_length = 512
    latents = WanLatents()
    frame_rate = 16.0
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

    def predict_video(
        self,
        model: Denoiser,
        noisy_NCFHW: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> Tensor:
        return model(noisy_NCFHW, time_N * 1000, text["text"], return_dict=False)[0]


class WanHighNoise(Wan):
    """The denoiser of Wan 2.2 for high noise levels. The pipeline has two denoisers, and uses this
    one from the level `boundary_ratio` on.
    """

    unneeded_parts = ("transformer_2",)
    other_denoiser = "transformer_2"

    def noise_range(self, index: Mapping[str, Any]) -> tuple[float, float]:
        return float(index["boundary_ratio"]), 1.0


class WanLowNoise(WanHighNoise):
    """The denoiser of Wan 2.2 for noise levels below `boundary_ratio`. Its LoRA is saved as that of
    a pipeline with only this denoiser, so that the tensors have the same names as for Wan 2.1.
    """

    denoiser_folder = "transformer_2"
    other_denoiser = "transformer"

    def noise_range(self, index: Mapping[str, Any]) -> tuple[float, float]:
        return 0.0, float(index["boundary_ratio"])


class LTXLatents(VideoLatents):
    """The latents of LTX's VAE. Its file contains the offset and the factor of each channel."""

    vae = "AutoencoderKLLTXVideo"

    def downscale(self, config: Config) -> int:
        ratio = config.get("spatial_compression_ratio")
        return int(ratio or config["patch_size"] * 2 ** sum(config["spatio_temporal_scaling"]))

    def frame_step(self, config: Config) -> int:
        ratio = config.get("temporal_compression_ratio")
        patch = config.get("patch_size_t") or 1
        return int(ratio or patch * 2 ** sum(config["spatio_temporal_scaling"]))

    def channels(self, config: Config) -> int:
        return int(config["latent_channels"])

    def statistics(self, vae: Any, device: torch.device) -> tuple[Tensor, Tensor]:
        offset, deviation = (
            values.float()[:, None, None, None] for values in (vae.latents_mean, vae.latents_std)
        )
        return offset, deviation / vae.config.scaling_factor


class LTX(VideoFamily):
    """LTX-Video. A token is one latent pixel. Positions are measured in pixels and in seconds. The
    denoiser gets T5's sequence of embeddings with its mask.
    """

    pipeline = "LTXPipeline"
    latent_side_multiple = 1
    max_text_length = 128
    latents = LTXLatents()
    frame_rate = 25.0
    text_output_indices = {"text": 0, "mask": 1}
    text_width_key = "caption_channels"
    text_arguments = MASK_ARGUMENTS
    block_classes = ("LTXVideoTransformerBlock",)
    comfyui_prefix = "diffusion_model"

    def predict_video(
        self,
        model: Denoiser,
        noisy_NCFHW: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> Tensor:
        frames, height, width = noisy_NCFHW.shape[-3:]
        output_NTC = model(
            latents_to_tokens(noisy_NCFHW),
            text["text"],
            time_N * 1000,
            text["mask"],
            num_frames=frames,
            height=height,
            width=width,
            rope_interpolation_scale=(
                conditioning.frame_step / conditioning.frame_rate,
                conditioning.downscale,
                conditioning.downscale,
            ),
            return_dict=False,
        )[0]
        return tokens_to_video(output_NTC, height, width)

    def video_arguments(self, settings: SampleSettings) -> dict[str, Any]:
        return super().video_arguments(settings) | {"frame_rate": settings.frame_rate}

    def output_video(self, pipe: Any, output: Tensor, size: Size) -> Tensor:
        factor = pipe.vae_spatial_compression_ratio
        return tokens_to_video(output, size.height // factor, size.width // factor)


def tokens_to_video(tokens_NTC: Tensor, height: int, width: int) -> Tensor:
    """Arranges tokens as latents F[N C F H W]. There is one token for each latent pixel."""
    latents: Tensor = tokens_NTC.transpose(1, 2).unflatten(2, (-1, height, width))
    return latents
