"""Families that make videos, with a picture as the only frame of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .family import Asked, Config, Family, Latents, OfAVideo, masked_prompts


class OfWan(OfAVideo):
    vae = "AutoencoderKLWan"

    def downscale(self, config: Config) -> int:
        return int(config.get("scale_factor_spatial") or 8)


class Wan(Family):
    """Wan 2.1, and of 2.2 the model with one denoiser: UMT5's sequence, zero where it is padded."""

    pipeline = "WanPipeline"
    max_text_length = 512
    encoders = ("text_encoder", "tokenizer")
    latents = OfWan()
    in_comfyui = "diffusion_model"
    comfyui_names = {
        ".attn1.": ".self_attn.", ".attn2.": ".cross_attn.", ".to_q": ".q", ".to_k": ".k", ".to_v": ".v", ".to_out.0": ".o",
        ".ffn.net.0.proj": ".ffn.0", ".ffn.net.2": ".ffn.2",
    }  # fmt: skip

    def refusal(self, index: Mapping[str, Any]) -> str | None:
        if index.get("transformer_2", [None, None])[1] is None:
            return None
        return "it has two denoisers, one for much noise and one for little: a run trains one (Wan 2.1, or 2.2 TI2V)"

    def text_shapes(self, config: Config, length: int) -> dict[str, tuple[int, ...]]:
        return {"text": (length, int(config["text_dim"]))}

    def encode_text(self, pipe: Any, captions: list[str], *, max_length: int) -> dict[str, Tensor]:
        text_NSD, _ = pipe.encode_prompt(captions, do_classifier_free_guidance=False, max_sequence_length=max_length)
        return {"text": text_NSD}

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        made_NCFHW: Tensor = model(noisy_NCHW[:, :, None], time_N * 1000, text["text"], return_dict=False)[0]
        return made_NCFHW[:, :, 0]

    def prompts(self, text: dict[str, Tensor], empty: dict[str, Tensor]) -> dict[str, Any]:
        return {"prompt_embeds": text["text"], "negative_prompt_embeds": empty["text"], "num_frames": 1}

    def drawn(self, pipe: Any, made: Tensor, size: int) -> Tensor:
        return made[:, :, 0]


class OfLTX(Latents):
    """Offsets and factors of the channels are in the VAE's own file."""

    vae = "AutoencoderKLLTXVideo"

    def downscale(self, config: Config) -> int:
        told = config.get("spatial_compression_ratio")
        return int(told or config["patch_size"] * 2 ** sum(config["spatio_temporal_scaling"]))

    def encode(self, vae: Any, x_N3HW: Tensor) -> tuple[Tensor, Tensor]:
        found = vae.encode(x_N3HW[:, :, None]).latent_dist
        offset, deviation = _by_channel(vae)
        return (found.mean[:, :, 0].float() - offset) / deviation, found.std[:, :, 0].float() / deviation

    def decode(self, vae: Any, latents_NCHW: Tensor) -> Tensor:
        offset, deviation = _by_channel(vae)
        unscaled = (latents_NCHW * deviation + offset).to(vae.dtype)
        noise = unscaled.new_zeros(len(unscaled)) if vae.config.timestep_conditioning else None
        made: Tensor = vae.decode(unscaled[:, :, None], noise, return_dict=False)[0]
        return made[:, :, 0]


def _by_channel(vae: Any) -> tuple[Tensor, Tensor]:
    """fp32[C 1 1] each."""
    offset, deviation = (values.float()[:, None, None] for values in (vae.latents_mean, vae.latents_std))
    return offset, deviation / vae.config.scaling_factor


class LTX(Family):
    """LTX-Video: a latent pixel is a token, T5's sequence with its mask, positions in pixels."""

    pipeline = "LTXPipeline"
    downscale = 1
    max_text_length = 128
    encoders = ("text_encoder", "tokenizer")
    latents = OfLTX()
    blocks = ("LTXVideoTransformerBlock",)
    in_comfyui = "diffusion_model"

    def text_shapes(self, config: Config, length: int) -> dict[str, tuple[int, ...]]:
        return {"text": (length, int(config["caption_channels"])), "mask": (length,)}

    def encode_text(self, pipe: Any, captions: list[str], *, max_length: int) -> dict[str, Tensor]:
        text_NSD, mask_NS, _, _ = pipe.encode_prompt(captions, do_classifier_free_guidance=False, max_sequence_length=max_length)
        return {"text": text_NSD, "mask": mask_NS.to(text_NSD.dtype)}

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        height, width = noisy_NCHW.shape[-2:]
        made_NTC = model(
            noisy_NCHW.flatten(2).transpose(1, 2), text["text"], time_N * 1000, text["mask"], num_frames=1, height=height, width=width,
            rope_interpolation_scale=(1.0, asked.downscale, asked.downscale), return_dict=False,
        )[0]  # fmt: skip
        made: Tensor = made_NTC.transpose(1, 2).unflatten(2, (height, width))
        return made

    def prompts(self, text: dict[str, Tensor], empty: dict[str, Tensor]) -> dict[str, Any]:
        return {**masked_prompts(text, empty), "num_frames": 1}

    def drawn(self, pipe: Any, made: Tensor, size: int) -> Tensor:
        side = size // pipe.vae_spatial_compression_ratio
        latents: Tensor = made.transpose(1, 2).unflatten(2, (side, side))
        return latents
