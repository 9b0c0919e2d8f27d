"""Contains the model families that learn to predict the noise or v, with a schedule of discrete
steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..picture_sizes import Size
from .family import (
    MASK_ARGUMENTS,
    POOLED_ARGUMENTS,
    Conditioning,
    Config,
    Denoiser,
    Family,
    Text,
    denoiser_config,
)

MAX_CLIP_WINDOWS = 3


def tokenize_windows(tokenizer: Any, captions: Sequence[str], windows: int) -> Tensor:
    """Returns the tokens of captions that a CLIP encoder reads in several windows. ComfyUI, Forge
    and kohya's scripts read long prompts in the same way. Each window has its own begin token and
    end token. If a caption is longer than all windows together, the rest is dropped.

    tokenizer  CLIP's tokenizer, with L = `model_max_length`; a window contains L - 2 tokens of the
               caption
    ->         int64[N windows*L]
    """
    length = tokenizer.model_max_length
    if windows == 1:
        tokens = tokenizer(
            list(captions),
            padding="max_length",
            max_length=length,
            truncation=True,
            return_tensors="pt",
        )
        ids: Tensor = tokens.input_ids
        return ids
    content = length - 2
    rows = []
    for caption in captions:
        ids = tokenizer(caption, add_special_tokens=False, verbose=False).input_ids
        row: list[int] = []
        for start in range(0, windows * content, content):
            window = [
                tokenizer.bos_token_id,
                *ids[start : start + content],
                tokenizer.eos_token_id,
            ]
            row += window + [tokenizer.pad_token_id] * (length - len(window))
        rows.append(row)
    return torch.tensor(rows)


class StableDiffusion(Family):
    """Stable Diffusion 1.5 and 2. They have a U-Net that works on latents, and one CLIP encoder."""

    pipeline = "StableDiffusionPipeline"
    denoiser = "unet"
    objectives = ("epsilon", "v")
    latent_side_multiple = 8
    max_text_length = None
    max_clip_windows = MAX_CLIP_WINDOWS
    text_width_key = "cross_attention_dim"
    trainable_encoders: ClassVar[tuple[str, ...]] = ("text_encoder",)
    unneeded_parts = ("safety_checker", "feature_extractor", "image_encoder")
    adapted_block_classes = ("Transformer2DModel",)

    def count_text_tokens(self, clip_length: int, max_length: int) -> int:
        return clip_length * self.clip_windows(clip_length, max_length)

    def encode_text(
        self, pipe: Any, captions: list[str], *, max_length: int, **options: Any
    ) -> Mapping[str, Tensor]:
        windows = self.clip_windows(pipe.tokenizer.model_max_length, max_length)
        if windows > 1:
            encoders = {part: getattr(pipe, part) for part in self.trainable_encoders}
            tokenizers = [
                getattr(pipe, part.replace("text_encoder", "tokenizer")) for part in encoders
            ]
            ids = [tokenize_windows(tokenizer, captions, windows) for tokenizer in tokenizers]
            return self.encode_tokens(encoders, torch.stack(ids, 1).to(pipe._execution_device))
        return super().encode_text(
            pipe,
            captions,
            max_length=max_length,
            device=pipe._execution_device,
            num_images_per_prompt=1,
        )

    def encode_tokens(self, encoders: Mapping[str, nn.Module], ids_NPS: Tensor) -> Text:
        encoder: Any = encoders["text_encoder"]
        hidden = encoder(_split_windows(encoder, ids_NPS[:, 0]))[0]
        return {"text": _join_windows(hidden, len(ids_NPS))}

    def predict(
        self,
        model: Denoiser,
        noisy_NCHW: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> Tensor:
        return model(
            noisy_NCHW, time_N, encoder_hidden_states=text.get("text", text), return_dict=False
        )[0]


class SDXL(StableDiffusion):
    """Stable Diffusion XL. Its inputs are the concatenated features of two CLIP encoders, and the
    size of the picture.
    """

    pipeline = "StableDiffusionXLPipeline"
    latent_side_multiple = 4
    encoder_parts = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    text_output_indices = {"text": 0, "pooled": 2}
    text_arguments = POOLED_ARGUMENTS
    trainable_encoders = ("text_encoder", "text_encoder_2")
    unused_last_layers = ("text_encoder",)

    def text_shapes(self, config: Config, length: int) -> dict[str, tuple[int, ...]]:
        width = int(config["projection_class_embeddings_input_dim"]) - 6 * int(
            config["addition_time_embed_dim"]
        )
        return {"text": (length, int(config[self.text_width_key])), "pooled": (width,)}

    def encode_text(
        self, pipe: Any, captions: list[str], *, max_length: int, **options: Any
    ) -> Mapping[str, Tensor]:
        texts = super().encode_text(pipe, captions, max_length=max_length)
        if not pipe.config.force_zeros_for_empty_prompt:
            return texts
        has_caption = torch.tensor(
            [caption != "" for caption in captions], device=texts["text"].device
        )
        # the pipeline guides away from zeros, so a dropped caption is encoded as zeros too
        return {
            text_name: text * has_caption.view(-1, *[1] * (text.ndim - 1))
            for text_name, text in texts.items()
        }

    def encode_tokens(self, encoders: Mapping[str, nn.Module], ids_NPS: Tensor) -> Text:
        outputs = [
            encoder(_split_windows(encoder, ids_NPS[:, i]), output_hidden_states=True)
            for i, encoder in enumerate(encoders.values())
        ]
        hidden = torch.cat([output.hidden_states[-2] for output in outputs], -1)
        # the pooled text is that of a caption's first window
        pooled = outputs[-1].text_embeds.unflatten(0, (len(ids_NPS), -1))[:, 0]
        return {"text": _join_windows(hidden, len(ids_NPS)), "pooled": pooled}

    def predict(
        self,
        model: Denoiser,
        noisy_NCHW: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> Tensor:
        return model(
            noisy_NCHW,
            time_N,
            encoder_hidden_states=text.get("text", text),
            return_dict=False,
            added_cond_kwargs={
                "text_embeds": text.get("pooled"),
                "time_ids": size_conditioning(noisy_NCHW, conditioning),
            },
        )[0]


def _split_windows(encoder: Any, ids_NS: Tensor) -> Tensor:
    """Splits tokens into windows. Returns int64[N*windows L] for an encoder with L positions."""
    return ids_NS.reshape(-1, encoder.config.max_position_embeddings)


def _join_windows(hidden: Tensor, captions: int) -> Tensor:
    """Joins the windows of each caption, F[N*windows L D] -> F[N windows*L D]."""
    return hidden.reshape(captions, -1, hidden.shape[-1])


def size_conditioning(noisy_NCHW: Tensor, conditioning: Conditioning) -> Tensor:
    """Returns the inputs of SDXL that describe the size, fp32[N 6]. They are, in pixels, the
    original height and width, the top and left of the crop, and the target height and width.
    Without a crop, the original size is the same as the target size, as with the pipeline's
    defaults.

    Source  Podell et al. 2023, 2.2, in the order of diffusers' train_text_to_image_lora_sdxl
    """
    height, width = (side * conditioning.downscale for side in noisy_NCHW.shape[-2:])
    target = torch.tensor([height, width], dtype=torch.float32, device=noisy_NCHW.device).repeat(
        len(noisy_NCHW), 1
    )
    if conditioning.crop is None:
        size_and_crop = torch.cat([target, torch.zeros_like(target)], 1)
    else:
        size_and_crop = conditioning.crop
    return torch.cat([size_and_crop, target], 1)


class PixArtAlpha(Family):
    """PixArt-alpha. The denoiser gets the latents as a picture, not as tokens. It also gets T5's
    sequence of embeddings with its mask. In addition to the noise, the denoiser predicts a
    variance, which training does not use.
    """

    pipeline = "PixArtAlphaPipeline"
    objectives = ("epsilon", "v")
    max_text_length = 120
    text_output_indices = {"text": 0, "mask": 1}
    text_width_key = "caption_channels"
    text_arguments = MASK_ARGUMENTS
    loads_lora = False
    adapted_block_classes = ("BasicTransformerBlock",)

    def predict(
        self,
        model: Denoiser,
        noisy_NCHW: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> Tensor:
        output = model(
            noisy_NCHW,
            encoder_hidden_states=text["text"],
            encoder_attention_mask=text["mask"],
            timestep=time_N,
            added_cond_kwargs=size_inputs(model, noisy_NCHW, conditioning.downscale),
            return_dict=False,
        )[0]
        return output[:, : noisy_NCHW.shape[1]]  # the rest is the variance

    def extra_arguments(
        self, pipe: Any, size: Size, controls: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        return {"negative_prompt": None, "use_resolution_binning": False}


class PixArtSigma(PixArtAlpha):
    """PixArt-Sigma. It differs from PixArt-alpha only in the length of captions."""

    pipeline = "PixArtSigmaPipeline"
    max_text_length = 300


def size_inputs(model: Any, noisy_NCHW: Tensor, downscale: int) -> dict[str, Tensor | None]:
    """Returns the inputs of PixArt that describe the size. They are the height and width in pixels,
    fp32[N 2], and their ratio, fp32[N 1]. Returns None if the model does not have these inputs. The
    model PixArt-alpha for 1024 pixels has these inputs.
    """
    config = denoiser_config(model)
    if not (
        config.sample_size == 128
        if config.use_additional_conditions is None
        else config.use_additional_conditions
    ):
        return {"resolution": None, "aspect_ratio": None}
    n, _, height, width = noisy_NCHW.shape
    size = torch.tensor(
        [height * downscale, width * downscale], dtype=torch.float32, device=noisy_NCHW.device
    )
    return {"resolution": size.repeat(n, 1), "aspect_ratio": (size[:1] / size[1:]).repeat(n, 1)}
