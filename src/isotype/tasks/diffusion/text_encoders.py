"""Makes it possible to train text encoders together with the denoiser (`adapter.text_encoders`).
The text encoders become submodules of the denoiser with the names `text_encoders.PART`.

So the adapter, the optimizer, checkpoints, weight averages and the precision treat the denoiser and
the text encoders as one model. A step needs only one forward. The denoiser then gets token ids in
place of embeddings, and encodes them first. The store contains the tokens of captions, not their
embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...config.schema import RunConfig
from ...instance_method import InstanceMethod
from .families import Family
from .families.noise import tokenize_windows
from .pipeline import PipelineFolder

# beginning of the paths of text encoders, which are a child of the denoiser
PREFIX = "text_encoders."
ADAPTED_LAYERS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.out_proj",
    "mlp.fc1",
    "mlp.fc2",
)


class TextEncoders(nn.Module):
    """Contains the text encoders of a pipeline. Each has the name of its part.

    zeroes_empty_captions  whether the embeddings of an empty caption are zeros
                           (`force_zeros_for_empty_prompt`)
    """

    def __init__(
        self, encoders: Mapping[str, nn.Module], family: Family, *, zeroes_empty_captions: bool
    ) -> None:
        super().__init__()
        self.family = family
        self.zeroes_empty_captions = zeroes_empty_captions
        for part, encoder in encoders.items():
            self.add_module(part, encoder)

    def forward(self, ids: Tensor, captioned: Tensor) -> dict[str, Tensor]:
        """Encodes tokens in the same way as `Family.encode_text` encodes captions.

        ids        int64[N P S]  the tokens of each caption, for P encoders
        captioned  bool[N]       whether the caption is not empty
        ->         F[N ...]      each result, in the dtype of `compute`
        """
        text = self.family.encode_tokens(dict(self.named_children()), ids)
        if not self.zeroes_empty_captions:
            return text
        return {
            name: tensor * captioned.view(-1, *[1] * (tensor.ndim - 1))
            for name, tensor in text.items()
        }


def attach_encoders(
    denoiser: nn.Module, folder: PipelineFolder, encoders: Mapping[str, nn.Module]
) -> None:
    """Adds frozen text encoders to the denoiser as submodules. Call it before the adapter is
    attached, and before `apply_precision`.
    """
    if len(encoders) > 1:
        zeroes_empty_captions = bool(folder.index.get("force_zeros_for_empty_prompt", True))
    else:
        zeroes_empty_captions = False
    denoiser.add_module(
        PREFIX[:-1],
        TextEncoders(encoders, folder.family, zeroes_empty_captions=zeroes_empty_captions),
    )
    InstanceMethod(_forward, denoiser).install()


def _forward(
    denoiser: Any,
    sample: Tensor | None,
    timestep: Tensor | None,
    encoder_hidden_states: Any,
    *,
    added_cond_kwargs: dict[str, Tensor] | None = None,
    **kwargs: Any,
) -> Any:
    """The forward of the denoiser, which also accepts tokens (`ids`, `captioned`) as its text. If
    `sample` is not given, it returns only the encoded text.
    """
    if isinstance(encoder_hidden_states, dict):
        text = denoiser.text_encoders(**encoder_hidden_states)
        if sample is None:
            return text
        encoder_hidden_states = text["text"]
        if added_cond_kwargs is not None:
            added_cond_kwargs = {**added_cond_kwargs, "text_embeds": text["pooled"]}
    return type(denoiser).forward(
        denoiser,
        sample,
        timestep,
        encoder_hidden_states,
        added_cond_kwargs=added_cond_kwargs,
        **kwargs,
    )


def drop_untrained_encoders(config: RunConfig) -> RunConfig:
    """If every text encoder has the learning rate 0, returns the configuration in which none is
    trained.
    """
    rate = config.adapter.text_encoder_rate
    rates = rate if isinstance(rate, list) else [rate]
    if not rates or any(rates) or rate is None:
        return config
    adapter = config.adapter.model_copy(update={"text_encoders": False, "text_encoder_rate": None})
    return config.model_copy(update={"adapter": adapter})


def encoder_targets(
    denoiser: nn.Module, family: Family, rates: float | Sequence[float] | None = None
) -> list[str]:
    """Returns the attention and MLP layers of the text encoders that get an adapter. The last layer
    of a text encoder is left out if the model family does not use its result.
    """
    targets = []
    for number, part in enumerate(
        family.trainable_encoders if hasattr(denoiser, PREFIX[:-1]) else ()
    ):
        if isinstance(rates, Sequence) and not rates[number]:
            continue  # an encoder with the rate 0 is not trained
        names = [
            name
            for name, _ in denoiser.get_submodule(f"{PREFIX}{part}").named_modules()
            if name.endswith(ADAPTED_LAYERS)
        ]
        if part in family.unused_last_layers:
            last = max(int(name.split(".layers.")[1].split(".")[0]) for name in names)
        else:
            last = -1
        targets += [f"{PREFIX}{part}.{name}" for name in names if f".layers.{last}." not in name]
    return targets


def split_part(name: str, family: Family) -> tuple[str, str]:
    """Splits the name of an adapter's module or tensor into the part of the pipeline and the name
    within this part. The name within the part is the one that published files use
    (`text_model.encoder...`).
    """
    if not name.startswith(PREFIX):
        return family.denoiser, name
    part, _, inner_name = name.removeprefix(PREFIX).partition(".")
    return part, inner_name if inner_name.startswith("text_model.") else f"text_model.{inner_name}"


def tokenize_captions(
    pipe: Any, captions: Sequence[str], family: Family, max_text_length: int
) -> dict[str, Tensor]:
    """Tokenizes captions with the tokenizers of the pipeline.

    max_text_length  the setting `diffusion.max_text_length`; 0 if it is not set
    ->          `ids` int64[N P S], `captioned` bool[N]
    """
    ids_by_encoder = []
    for part in family.trainable_encoders:
        tokenizer = getattr(pipe, part.replace("text_encoder", "tokenizer"))
        windows = family.clip_windows(tokenizer.model_max_length, max_text_length)
        ids_by_encoder.append(tokenize_windows(tokenizer, captions, windows))
    return {
        "ids": torch.stack(ids_by_encoder, 1),
        "captioned": torch.tensor([caption != "" for caption in captions]),
    }
