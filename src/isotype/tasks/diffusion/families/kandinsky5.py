"""Contains the model family Kandinsky 5 for pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..picture_sizes import Size
from .family import Conditioning, Config, Denoiser, Family, Latents, Text


class KandinskyLatents(Latents):
    """The latents of Flux's VAE with its factor, but without its offset, as in the pipeline."""

    def offset(self, vae: Any) -> float:
        return 0.0


class Kandinsky5(Family):
    """The version of Kandinsky 5 that generates pictures. The denoiser gets a picture as a video of
    one frame, with the channels in the last dimension. It also gets the text embeddings of a
    vision-language model and CLIP's pooled text embedding. The denoiser takes no mask for the
    text. Therefore it gets captions without padding.
    """

    pipeline = "Kandinsky5T2IPipeline"
    comfyui_prefix = "diffusion_model"
    max_text_length = 512
    latents = KandinskyLatents()
    keeps_text_lengths = True
    encoder_parts = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    block_classes = ("Kandinsky5TransformerEncoderBlock", "Kandinsky5TransformerDecoderBlock")

    def text_shapes(self, config: Config, length: int) -> dict[str, tuple[int, ...]]:
        return {
            "text": (length, int(config["in_text_dim"])),
            "pooled": (int(config["in_text_dim2"]),),
            "mask": (length,),  # added when captions of different lengths become a batch
        }

    def encode_text(
        self, pipe: Any, captions: list[str], *, max_length: int, **options: Any
    ) -> Mapping[str, Any]:
        # one caption at a time, so that none is padded
        texts = [
            pipe.encode_prompt([caption], max_sequence_length=max_length) for caption in captions
        ]
        return {
            "text": [text_1SD[0] for text_1SD, _, _ in texts],
            "pooled": torch.cat([pooled_1D for _, pooled_1D, _ in texts]),
        }

    def predict(
        self,
        model: Denoiser,
        noisy_NCHW: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> Tensor:
        """Returns the denoiser's prediction. If the captions have different lengths, they cannot
        form one batch. Then each row has its own forward pass.
        """
        lengths = conditioning.lengths or (text["text"].shape[1],) * len(noisy_NCHW)
        if len(set(lengths)) > 1:
            return torch.cat(
                [
                    self.predict(
                        model,
                        noisy_NCHW[i : i + 1],
                        time_N[i : i + 1],
                        {name: tensor[i : i + 1] for name, tensor in text.items()},
                        replace(conditioning, lengths=(length,)),
                    )
                    for i, length in enumerate(lengths)
                ]
            )
        device = noisy_NCHW.device
        height, width = noisy_NCHW.shape[-2:]
        text_NSD = text["text"][:, : lengths[0]]
        positions = [torch.arange(side, device=device) for side in (1, height // 2, width // 2)]
        output: Any = model(
            hidden_states=noisy_NCHW.permute(0, 2, 3, 1)[:, None],
            encoder_hidden_states=text_NSD,
            timestep=time_N * 1000,
            pooled_projections=text["pooled"],
            visual_rope_pos=positions,
            text_rope_pos=torch.arange(lengths[0], device=device),
            return_dict=False,
        )
        prediction_NCHW: Tensor = output[:, 0].permute(0, 3, 1, 2)
        return prediction_NCHW

    def text_inputs(self, text: Text, empty: Text) -> dict[str, Any]:
        return {
            f"{sign}prompt_{name}": value
            for sign, texts in (("", text), ("negative_", empty))
            for name, value in (
                ("embeds_qwen", texts["text"]),
                ("embeds_clip", texts["pooled"]),
                ("cu_seqlens", torch.tensor([0, texts["text"].shape[1]])),
            )
        }

    def extra_arguments(
        self, pipe: Any, size: Size, controls: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        # the pipeline changes every size that is not in its list
        pipe.resolutions = [(size.width, size.height)]
        return {}

    def output_latents(self, pipe: Any, output: Tensor, size: Size) -> Tensor:
        return output[:, 0].permute(0, 3, 1, 2)
