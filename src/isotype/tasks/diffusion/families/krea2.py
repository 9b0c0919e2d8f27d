"""Contains the model family Krea 2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .family import (
    Conditioning,
    Config,
    Denoiser,
    SampleSettings,
    Text,
    VideoLatents,
)
from .flow import PackedTokens, pack_latents, position_ids, unpack_latents


class Krea2(PackedTokens):
    """Krea 2. The text tokens and the picture tokens form one sequence. For each text token, the
    denoiser gets the outputs of several layers of a vision-language model, and combines them.
    """

    pipeline = "Krea2Pipeline"
    max_text_length = 512
    latents = VideoLatents()
    text_output_indices = {"text": 0, "mask": 1}
    text_arguments = {"prompt_embeds": "text", "prompt_embeds_mask": "mask"}
    block_classes = ("Krea2TransformerBlock",)
    original_names = {
        "transformer_blocks.": "blocks.",
        ".attn.to_q": ".attn.wq",
        ".attn.to_k": ".attn.wk",
        ".attn.to_v": ".attn.wv",
        ".attn.to_out.0": ".attn.wo",
        ".attn.to_gate": ".attn.gate",
        ".ff.": ".mlp.",
        "img_in": "first",
        "txt_in.linear_1": "txtmlp.1",
        "txt_in.linear_2": "txtmlp.3",
        "time_embed.linear_1": "tmlp.0",
        "time_embed.linear_2": "tmlp.2",
        "time_mod_proj": "tproj.1",
        "text_fusion.": "txtfusion.",
        "final_layer.": "last.",
    }

    def text_shapes(self, config: Config, length: int) -> dict[str, tuple[int, ...]]:
        layers, width = int(config["num_text_layers"]), int(config["text_hidden_dim"])
        return {"text": (length, layers, width), "mask": (length,)}

    def predict(
        self,
        model: Denoiser,
        noisy_NCHW: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> Tensor:
        height, width = noisy_NCHW.shape[-2:]
        ids_T3 = position_ids(height // 2, width // 2, noisy_NCHW.device)
        text_ids_S3 = ids_T3.new_zeros(text["text"].shape[1], 3)
        output_NTC = model(
            hidden_states=pack_latents(noisy_NCHW),
            timestep=time_N,
            encoder_hidden_states=text["text"],
            encoder_attention_mask=text["mask"].bool(),
            position_ids=torch.cat([text_ids_S3, ids_T3]),
            return_dict=False,
        )[0]
        return unpack_latents(output_NTC, height, width)

    def text_inputs(self, text: Text, empty: Text) -> dict[str, Any]:
        with_mask = (texts | {"mask": texts["mask"].bool()} for texts in (text, empty))
        return super().text_inputs(*with_mask)

    def sample(
        self,
        pipe: Any,
        text: Text,
        empty: Text,
        settings: SampleSettings,
        generator: Any,
        controls: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """Generates latents. The guidance scale of this pipeline is smaller by 1 than the scale of
        other pipelines. The scale 0 means that no guidance is used.
        """
        settings = replace(settings, guidance=max(0.0, settings.guidance - 1))
        return super().sample(pipe, text, empty, settings, generator, controls)
