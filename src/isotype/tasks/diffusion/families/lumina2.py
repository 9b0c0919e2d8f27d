"""Lumina 2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .family import Asked, Config, Family, masked_prompts


class Lumina2(Family):
    """Lumina 2: a caption behind the pipeline's system prompt in its own length, the velocity from noise to the latent."""

    pipeline = "Lumina2Pipeline"
    max_text_length = 256
    encoders = ("text_encoder", "tokenizer")
    own_lengths = True
    not_in_comfyui = "ComfyUI keeps its queries, keys and values in one matrix of other widths"

    def prepare(self, denoiser: Any) -> None:
        """Its positions are complex numbers of fp64 halves, which would make queries and keys fp64."""
        rope = denoiser.rope_embedder
        rope.freqs_cis = [table.to(torch.complex64) for table in rope.freqs_cis]

    def text_shapes(self, config: Config, length: int) -> dict[str, tuple[int, ...]]:
        return {"text": (length, int(config["cap_feat_dim"])), "mask": (length,)}

    def encode_text(self, pipe: Any, captions: list[str], *, max_length: int) -> dict[str, list[Tensor]]:
        """The empty caption, which is guided away from, is encoded without system prompt, as the pipeline does."""
        texts = []
        for caption in captions:
            # the pipeline puts the system prompt before `prompt` and not before `negative_prompt`
            text_1SD, mask_1S, away_1SD, away_1S = pipe.encode_prompt([caption], max_sequence_length=max_length)
            text, mask = (text_1SD, mask_1S) if caption else (away_1SD, away_1S)
            texts.append(text[0][mask[0].bool()])
        return {"text": texts}

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        mask: Any = _Mask(text["mask"], asked.lengths)
        made: Tensor = model(noisy_NCHW, 1 - time_N, text["text"], mask, return_dict=False)[0]
        return -made

    def prompts(self, text: dict[str, Tensor], empty: dict[str, Tensor]) -> dict[str, Any]:
        """Both of one length, which the pipeline asks for."""
        longest = max(words["text"].shape[1] for words in (text, empty))

        def padded(words: dict[str, Tensor]) -> dict[str, Tensor]:
            missing = longest - words["text"].shape[1]
            return {
                "text": pad(words["text"], (0, 0, 0, missing)),
                "mask": pad(words["text"].new_ones(words["text"].shape[:2]), (0, missing)).long(),
            }

        return masked_prompts(padded(text), padded(empty))


class _Mask:
    """A mask [N S] whose rows' sums are known: the denoiser asks for them in each pass, which would wait for the device, and cannot be
    answered by a plan, whose tensors have no data."""

    def __init__(self, mask_NS: Tensor, lengths: tuple[int, ...]) -> None:
        self.mask, self.lengths, self.shape = mask_NS, lengths, mask_NS.shape

    def sum(self, dim: int) -> _Mask:
        return self

    def tolist(self) -> list[int]:
        return list(self.lengths)

    def bool(self) -> Tensor:
        return self.mask.bool()
