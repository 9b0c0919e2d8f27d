"""HiDream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ....instance_method import InstanceMethod
from .family import Asked, Config, Family, config_of


class HiDream(Family):
    """HiDream: every layer of a language model beside T5's sequence and CLIP's pooled texts, experts, the velocity from noise to latent."""

    pipeline = "HiDreamImagePipeline"
    max_text_length = 128
    blocks = ("HiDreamBlock",)
    encoders = (
        "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3", "text_encoder_4", "tokenizer_4",
    )  # fmt: skip

    def text_shapes(self, config: Config, length: int) -> dict[str, tuple[int, ...]]:
        t5, language = config["caption_channels"]
        return {
            "text": (length, int(t5)), "layers": (1 + max(config["llama_layers"]), length, int(language)),
            "pooled": (int(config["text_emb_dim"]),),
        }  # fmt: skip

    def encode_text(self, pipe: Any, captions: list[str], *, max_length: int) -> dict[str, Tensor]:
        text_NSD, _, layers_KNSD, _, pooled_ND, _ = pipe.encode_prompt(
            captions, do_classifier_free_guidance=False, max_sequence_length=max_length
        )
        used = 1 + max(pipe.transformer.config.llama_layers)
        return {"text": text_NSD, "layers": layers_KNSD[:used].transpose(0, 1), "pooled": pooled_ND}

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        made: Tensor = model(
            noisy_NCHW, timesteps=time_N * 1000, encoder_hidden_states_t5=text["text"],
            encoder_hidden_states_llama3=text["layers"].transpose(0, 1), pooled_embeds=text["pooled"], return_dict=False,
        )[0]  # fmt: skip
        return -(made if made.shape == noisy_NCHW.shape else _as_picture(made, noisy_NCHW, config_of(model).patch_size))

    def prompts(self, text: dict[str, Tensor], empty: dict[str, Tensor]) -> dict[str, Any]:
        return {
            f"{sign}{name}": words[what].transpose(0, 1) if what == "layers" else words[what]
            for sign, words in (("", text), ("negative_", empty))
            for name, what in (("prompt_embeds_t5", "text"), ("prompt_embeds_llama3", "layers"), ("pooled_prompt_embeds", "pooled"))
        }

    def sample(
        self, pipe: Any, text: dict[str, Tensor], empty: dict[str, Tensor], *, size: int, steps: int, guidance: float, generator: Any,
        control: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        pipe.default_sample_size = size // pipe.vae_scale_factor  # it scales every size to the area of this one
        return super().sample(pipe, text, empty, size=size, steps=steps, guidance=guidance, generator=generator)

    def prepare(self, denoiser: Any) -> None:
        super().prepare(denoiser)
        if denoiser.final_layer.linear.weight.is_meta:  # in evaluation it reads the pictures' sizes from a tensor
            InstanceMethod(_unpatchify, denoiser, "unpatchify").put()
        for module in denoiser.modules():
            if type(module).__name__ == "MOEFeedForwardSwiGLU" and module.gate.weight.is_meta:
                InstanceMethod(_in_equal_parts, module).put()


def _unpatchify(denoiser: Any, x_NTP: Tensor, sizes: Any, is_training: bool) -> Tensor:
    made: Tensor = type(denoiser).unpatchify(denoiser, x_NTP, sizes, True)
    return made


def _as_picture(made_NCTP: Tensor, like_NCHW: Tensor, side: int) -> Tensor:
    """F[N C H W] of the tokens F[N C T side*side] that the denoiser gives in training; those behind the picture's are padding."""
    height, width = (length // side for length in like_NCHW.shape[-2:])
    tokens: Tensor = made_NCTP[:, :, : height * width].unflatten(2, (height, width)).unflatten(4, (side, side))
    return tokens.transpose(3, 4).flatten(4).flatten(2, 3)


def _in_equal_parts(moe: Any, x_NSD: Tensor) -> Tensor:
    """The shapes of the layer's own forward where each expert gets equally many tokens: of a plan, in which a token has no value."""
    tokens_TD = x_NSD.flatten(0, 1).repeat_interleave(moe.num_activated_experts, 0)
    parts = zip(tokens_TD.tensor_split(len(moe.experts)), moe.experts)
    made_TD = torch.cat([expert(part) for part, expert in parts])
    made: Tensor = made_TD.unflatten(0, (-1, moe.num_activated_experts)).sum(1).view_as(x_NSD) + moe.shared_experts(x_NSD)
    return made
