"""LoRA's dropout: a mask of a byte an element, and a factor that goes into the branch's scale."""

from __future__ import annotations

import torch
from torch import Tensor


def dropout_mask(like: Tensor, p: float) -> Tensor:
    """bool, in the shape of `like`: what a dropout keeps of it, drawn as PEFT's draws it, so that on a CPU a seed gives the same mask.

    PyTorch draws in the order in which a tensor lies in memory: the mask of a transposed one is transposed too.
    """
    return torch.empty_like(like, dtype=torch.bool).bernoulli_(1.0 - p)


def dropped_scale(scale: float, p: float) -> float:
    """The branch's scale with the dropout's own factor: 0 where everything is dropped."""
    return scale / (1.0 - p) if p < 1.0 else 0.0
