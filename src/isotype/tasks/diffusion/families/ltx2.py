"""Contains the model family LTX-2."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ....errors import UsageError
from ..picture_sizes import Size
from .family import (
    MASK_ARGUMENTS,
    Conditioning,
    Config,
    Denoiser,
    SampleSettings,
    Text,
    denoiser_config,
    latents_to_tokens,
)
from .video import LTX, LTXLatents, tokens_to_video


class LTX2Latents(LTXLatents):
    """The latents of LTX-2's VAE for videos."""

    vae = "AutoencoderKLLTX2Video"


class LTX2(LTX):
    """LTX-2. The denoiser has a stream of layers for the video and another one for its sound. Only
    the stream of the video is trained, and the attention between the two streams is off, as in
    Lightricks' trainer for videos without sound. The stream of the sound gets one token of zeros,
    and its result is not used.

    The text embeddings are those of a Gemma model after the pipeline's connectors. `text` is the
    input of the video's stream, and `audio` is the input of the other stream. Samples are generated
    by both streams, and their sound is dropped.
    """

    pipeline = "LTX2Pipeline"
    max_text_length = 1024
    latents = LTX2Latents()
    frame_rate = 24.0
    encoder_parts = ("text_encoder", "tokenizer", "connectors")
    unneeded_parts = ("audio_vae", "vocoder", "processor", "prompt_enhancer", "duration_head")
    text_arguments = MASK_ARGUMENTS
    block_classes = ("LTX2VideoTransformerBlock",)
    frozen_layers = (".audio_", ".video_to_audio_")

    def text_shapes(self, config: Config, length: int) -> dict[str, tuple[int, ...]]:
        if config["use_prompt_embeddings"]:
            width = audio_width = int(config["caption_channels"])
        else:
            width, audio_width = (
                int(config["cross_attention_dim"]),
                int(config["audio_cross_attention_dim"]),
            )
        return {"text": (length, width), "audio": (length, audio_width), "mask": (length,)}

    def encode_text(
        self, pipe: Any, captions: list[str], *, max_length: int, **options: Any
    ) -> Mapping[str, Tensor]:
        registers = pipe.connectors.config.video_connector_num_learnable_registers
        if registers and max_length % registers:
            raise UsageError(
                f"diffusion.max_text_length: {max_length}: {self.pipeline} pads captions with"
                f" {registers} learnt tokens",
                fix=f"diffusion.max_text_length: a multiple of {registers}",
            )
        layers_NSD, mask_NS, _, _ = pipe.encode_prompt(
            captions, do_classifier_free_guidance=False, max_sequence_length=max_length
        )
        text_NSD, audio_NSD, mask_NS = pipe.connectors(
            layers_NSD, mask_NS, padding_side=pipe.tokenizer.padding_side
        )
        return {"text": text_NSD, "audio": audio_NSD, "mask": mask_NS.to(text_NSD.dtype)}

    def predict_video(
        self,
        model: Denoiser,
        noisy_NCFHW: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> Tensor:
        rows, _, frames, height, width = noisy_NCFHW.shape
        sound_channels = denoiser_config(model).audio_in_channels
        output_NTC = model(
            hidden_states=latents_to_tokens(noisy_NCFHW),
            audio_hidden_states=noisy_NCFHW.new_zeros(rows, 1, sound_channels),
            encoder_hidden_states=text["text"],
            audio_encoder_hidden_states=text["audio"],
            timestep=time_N * 1000,
            sigma=time_N * 1000,
            encoder_attention_mask=text["mask"],
            audio_encoder_attention_mask=text["mask"],
            num_frames=frames,
            height=height,
            width=width,
            fps=conditioning.frame_rate,
            audio_num_frames=1,
            isolate_modalities=True,
            return_dict=False,
        )[0]
        return tokens_to_video(output_NTC, height, width)

    def text_inputs(self, text: Text, empty: Text) -> dict[str, Any]:
        """Returns the pipeline's arguments. The embeddings of both streams are one tensor, which
        `sample` splits again.
        """
        joined = (
            {"text": torch.cat([texts["text"], texts["audio"]], -1), "mask": texts["mask"]}
            for texts in (text, empty)
        )
        return super().text_inputs(*joined)

    def extra_arguments(
        self, pipe: Any, size: Size, controls: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        """Switches off the guidance that skips layers or separates the streams. The remaining
        guidance compares the prediction with that for the negative text.
        """
        streams = ("", "audio_")
        return {
            **{f"{stream}stg_scale": 0.0 for stream in streams},
            **{f"{stream}modality_scale": 1.0 for stream in streams},
            **{f"{stream}guidance_rescale": 0.0 for stream in streams},
            "spatio_temporal_guidance_blocks": [],
        }

    def sample(
        self,
        pipe: Any,
        text: Text,
        empty: Text,
        settings: SampleSettings,
        generator: Any,
        controls: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """Generates latents with the pipeline. The connectors were applied to the texts before. The
        VAE for sounds is replaced by its sizes, because the sound is not decoded.
        """
        config = pipe.transformer.config
        width = text["text"].shape[-1]
        pipe.connectors = lambda embeds, mask, padding_side: (
            embeds[..., :width],
            embeds[..., width:],
            mask,
        )
        mel_bins = config.audio_in_channels * pipe.audio_vae_mel_compression_ratio
        pipe.audio_vae = SimpleNamespace(
            config=SimpleNamespace(latent_channels=1, mel_bins=mel_bins),
            latents_mean=torch.zeros(()),
            latents_std=torch.ones(()),
        )
        pipe.audio_sampling_rate = config.audio_sampling_rate
        pipe.audio_hop_length = config.audio_hop_length
        pipe.audio_vae_temporal_compression_ratio = config.audio_scale_factor
        return super().sample(pipe, text, empty, settings, generator, controls)

    def video_arguments(self, settings: SampleSettings) -> dict[str, Any]:
        arguments = super().video_arguments(settings)
        return arguments | {"audio_guidance_scale": settings.guidance}

    def output_video(self, pipe: Any, output: Tensor, size: Size) -> Tensor:
        """Normalises the latents again. The pipeline returns them with the scale of the VAE."""
        offset, deviation = self.latents.statistics(pipe.vae, output.device)
        return (output - offset) / deviation
