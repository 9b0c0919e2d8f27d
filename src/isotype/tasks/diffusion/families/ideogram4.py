"""Contains the model family Ideogram 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .family import (
    Conditioning,
    Denoiser,
    Family,
    PatchedLatents,
    SampleSettings,
    Text,
    latents_to_tokens,
    replace_positions_in_plan,
    tokens_to_latents,
)


class IdeogramLatents(PatchedLatents):
    """Latents like those of Flux.2. The channels are sorted by the row within the patch, then by
    the column, then by the VAE's channel.
    """

    def patchify(self, x_NCHW: Tensor) -> Tensor:
        n, c, h, w = x_NCHW.shape
        patches = x_NCHW.reshape(n, c, h // 2, 2, w // 2, 2).permute(0, 3, 5, 1, 2, 4)
        return patches.reshape(n, 4 * c, h // 2, w // 2)

    def unpatchify(self, x_NCHW: Tensor) -> Tensor:
        n, c, h, w = x_NCHW.shape
        patches = x_NCHW.reshape(n, 2, 2, c // 4, h, w).permute(0, 3, 4, 1, 5, 2)
        return patches.reshape(n, c // 4, 2 * h, 2 * w)


class Ideogram4(Family):
    """Ideogram 4. The text tokens and the picture tokens form one sequence, with the padding before
    the text. The time is 0 for noise and 1 for the latent. A second denoiser, which gets no text,
    is used for guidance only. It is not loaded, and samples are generated without guidance.
    """

    pipeline = "Ideogram4Pipeline"
    latent_side_multiple = 1
    max_text_length = 2048
    latents = IdeogramLatents()
    keeps_text_lengths = True
    unneeded_parts = ("unconditional_transformer", "prompt_enhancer_head")
    text_width_key = "llm_features_dim"
    comfyui_prefix = "diffusion_model"
    comfyui_names = {".attention.to_out.0": ".attention.o"}
    comfyui_fused = {
        ".attention.qkv": (".attention.to_q", ".attention.to_k", ".attention.to_v"),
    }

    def prepare(self, denoiser: Any) -> None:
        super().prepare(denoiser)
        weight = denoiser.input_proj.weight
        replace_positions_in_plan(denoiser.rotary_emb, _empty_positions, weight)

    def encode_text(
        self, pipe: Any, captions: list[str], *, max_length: int, **options: Any
    ) -> Mapping[str, list[Tensor]]:
        text_NSD, _, _, is_text_NS = pipe.encode_prompt(
            captions, 0, 0, max_length, pipe.text_encoder.device
        )
        dtype = pipe.text_encoder.dtype
        return {
            "text": [
                text_SD[is_text_S != 0].to(dtype)
                for text_SD, is_text_S in zip(text_NSD, is_text_NS)
            ]
        }

    def predict(
        self,
        model: Denoiser,
        noisy_NCHW: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> Tensor:
        from diffusers import Ideogram4Pipeline

        height, width = noisy_NCHW.shape[-2:]
        rows, length, _ = text["text"].shape
        lengths = list(conditioning.lengths) or [length] * rows
        ids_NT3, segments_NT, kinds_NT = Ideogram4Pipeline._prepare_ids(
            lengths, height, width, length, noisy_NCHW.device
        )
        tokens_NTC = latents_to_tokens(noisy_NCHW)
        # the texts are padded at their ends, and are moved to the ends of their places
        text_NSD = torch.stack(
            [text_SD.roll(length - used, 0) for text_SD, used in zip(text["text"], lengths)]
        )
        padded_tokens_NTC = torch.cat(
            [tokens_NTC.new_zeros(rows, length, tokens_NTC.shape[-1]), tokens_NTC], 1
        )
        padded_text_NTD = torch.cat(
            [text_NSD, text_NSD.new_zeros(rows, height * width, text_NSD.shape[-1])], 1
        )
        output_NTC = model(
            hidden_states=padded_tokens_NTC,
            timestep=1 - time_N,
            encoder_hidden_states=padded_text_NTD,
            position_ids=ids_NT3,
            segment_ids=segments_NT,
            indicator=kinds_NT,
            return_dict=False,
        )[0]
        return -tokens_to_latents(output_NTC[:, length:], height, width)

    def sample(
        self,
        pipe: Any,
        text: Text,
        empty: Text,
        settings: SampleSettings,
        generator: Any,
        controls: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """Generates latents with the noise levels of the pipeline. The pipeline itself is not
        called, because it needs the second denoiser and takes no text embeddings.
        """
        from diffusers.pipelines.ideogram4.pipeline_ideogram4 import (
            _logit_normal_sigmas,
            _resolution_aware_mu,
        )

        device = text["text"].device
        factor = self.latents.downscale(pipe.vae.config)
        shape = (1, pipe.transformer.config.in_channels)
        size = (settings.size.height // factor, settings.size.width // factor)
        latents_1CHW = torch.randn((*shape, *size), generator=generator).to(device)
        mean = _resolution_aware_mu(settings.size.height, settings.size.width, 0.0)
        levels = _logit_normal_sigmas(settings.steps, mean, std=1.5, device=device)
        pipe.scheduler.set_timesteps(sigmas=levels.tolist(), device=device)
        with torch.no_grad():
            for time in pipe.scheduler.timesteps:
                velocity = self.predict(
                    pipe.transformer, latents_1CHW, time[None] / 1000, text, Conditioning()
                )
                latents_1CHW = pipe.scheduler.step(
                    velocity.float(), time, latents_1CHW, return_dict=False
                )[0]
        return latents_1CHW


def _empty_positions(table: Any, ids_NT3: Tensor) -> tuple[Tensor, Tensor]:
    """Returns empty cosines and sines with the shapes and dtypes of the original ones."""
    cosine = ids_NT3.new_empty(*ids_NT3.shape[:2], table.head_dim, dtype=torch.float32)
    return cosine, torch.empty_like(cosine)
