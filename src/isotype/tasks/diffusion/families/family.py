"""What differs between diffusers' model families, as training needs it.

Shapes: N pictures, C latent channels, H x W latent pixels, S text tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from .latents import Latents

FLOW_ONLY = ("flow_matching",)


@dataclass(frozen=True)
class Asked:
    """The inputs of a denoiser besides picture, time and text.

    guidance   the guidance scale of a guidance-distilled model
    downscale  pixels in a latent pixel, in each direction: models that are told a picture's size get it in pixels
    lengths    tokens of each caption, of a family with `own_lengths`
    """

    guidance: float = 1.0
    downscale: int = 8
    lengths: tuple[int, ...] = ()


class Family:
    """One family. Latents are what the VAE gives after its own shift and scale, whatever the denoiser takes.

    pipeline         the `_class_name` in model_index.json, a class of diffusers
    denoiser         the denoiser's folder and the pipeline's attribute
    objectives       what such models are trained to predict
    time_scale       where the denoiser rounds its noise level to the dtype of its hidden states: what it multiplies the level by before
                     the sinusoidal embedding (`exact_time`); None where it takes the level as given
    downscale        of latents: their sides are multiples of it; where the denoiser has tokens, the side of one
    max_text_length  longest caption by default, in tokens of the text encoder; None where every caption has the length of CLIP's
    own_lengths      a caption keeps its own length; those of a batch are padded to the longest, with a `mask`
    encoders         the names of text encoders and tokenizers in the folder
    not_needed       parts of the pipeline that are never loaded
    latents          what stands between the VAE and the denoiser
    loads_lora       whether the pipeline has `load_lora_weights`; else an adapter is a PEFT folder only
    not_in_comfyui   why ComfyUI does not read an adapter of this family; empty: it does
    adapted          see `blocks_of`; empty: the denoiser's `_no_split_modules`
    """

    pipeline: ClassVar[str]
    denoiser: ClassVar[str] = "transformer"
    objectives: ClassVar[tuple[str, ...]] = FLOW_ONLY
    time_scale: ClassVar[float | None] = None
    downscale: ClassVar[int] = 2
    max_text_length: ClassVar[int | None]
    encoders: ClassVar[tuple[str, ...]]
    not_needed: ClassVar[tuple[str, ...]] = ()
    latents: ClassVar[Latents] = Latents()
    own_lengths: ClassVar[bool] = False
    loads_lora: ClassVar[bool] = True
    not_in_comfyui: ClassVar[str] = ""
    adapted: ClassVar[tuple[str, ...]] = ()

    def blocks_of(self, denoiser: Any) -> tuple[str, ...]:
        """The classes whose linear layers get an adapter, and are quantised in an nf4 base."""
        return self.adapted or tuple(denoiser._no_split_modules or ())

    def unused(self, denoiser: Any) -> tuple[str, ...]:
        """Names, or beginnings of names, of layers in the blocks whose result the denoiser drops: nothing there gets a gradient."""
        return ()

    def text_tokens(self, clip_length: int, max_length: int) -> int:
        """S, from the lengths of the CLIP tokenizer and of T5's sequence."""
        return max_length

    def text_shapes(self, config: Mapping[str, Any], length: int) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of `encode_text`, without N.

        config  the denoiser's; length: S
        """
        return {"text": (length, int(config["joint_attention_dim"])), "pooled": (int(config["pooled_projection_dim"]),)}

    def encode_text(self, pipe: Any, captions: list[str], *, max_length: int) -> Mapping[str, Sequence[Tensor] | Tensor]:
        """`text` F[N S D] and what else the denoiser takes (`pooled` F[N D], `mask` F[N S]) of the pipeline's own text encoders. With
        `own_lengths` a list of F[S D], without mask."""
        raise NotImplementedError

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        """What the denoiser predicts for `noisy_NCHW` at `time_N` (`Objective.time`): F[N C H W]."""
        raise NotImplementedError

    def sample(
        self, pipe: Any, text: dict[str, Tensor], empty: dict[str, Tensor], *, size: int, steps: int, guidance: float, generator: Any
    ) -> Tensor:
        """Latents F[N C H W] from noise, as the denoiser sees them, through the pipeline's own denoising loop."""
        raise NotImplementedError


def config_of(model: Any) -> Any:
    """The denoiser's configuration, with an adapter or without."""
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).config


def masked_prompts(text: dict[str, Tensor], empty: dict[str, Tensor]) -> dict[str, Tensor]:
    """A pipeline's arguments for a text with a mask, and for the empty one that it guides away from."""
    return {
        "prompt_embeds": text["text"], "prompt_attention_mask": text["mask"], "negative_prompt_embeds": empty["text"],
        "negative_prompt_attention_mask": empty["mask"],
    }  # fmt: skip


class PooledTextFamily(Family):
    """Takes a text as a sequence and as one pooled vector, and guides away from an empty text."""

    def sample(
        self, pipe: Any, text: dict[str, Tensor], empty: dict[str, Tensor], *, size: int, steps: int, guidance: float, generator: Any
    ) -> Tensor:
        made: Tensor = pipe(
            prompt_embeds=text["text"], pooled_prompt_embeds=text["pooled"], negative_prompt_embeds=empty["text"],
            negative_pooled_prompt_embeds=empty["pooled"], height=size, width=size, num_inference_steps=steps, guidance_scale=guidance,
            generator=generator, output_type="latent",
        ).images  # fmt: skip
        return made
