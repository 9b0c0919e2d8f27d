"""NEFTune (Jain et al. 2023): noise on the input embeddings while a model trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class EmbeddingNoise:
    """Forward hook of an input embedding: in training mode uniform noise from -m to m, m = alpha / sqrt(tokens of a row x width)."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def __call__(self, module: nn.Module, args: Any, embedded: Tensor) -> Tensor | None:
        """embedded: F[rows tokens width]"""
        if not module.training or not torch.is_grad_enabled():
            return None
        most = self.alpha / (embedded.shape[-2] * embedded.shape[-1]) ** 0.5
        return embedded + torch.empty_like(embedded).uniform_(-most, most)


def put_embedding_noise(model: Any, alpha: float) -> None:
    model.get_input_embeddings().register_forward_hook(EmbeddingNoise(alpha))
