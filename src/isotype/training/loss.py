"""The causal loss as a sum over supervised tokens, so that every mean is taken over tokens, once, by whoever knows how many there are."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..data.rows import IGNORED
from ..dtypes import to_torch


def token_loss_sum(logits_BTV: Tensor, labels_BT: Tensor, *, dtype: str = "fp32") -> Tensor:
    """Cross-entropy of each next token, summed.

    logits_BTV  float[B T V]
    labels_BT   int[B T]      -100 where there is no loss; the label at t is predicted at t - 1
    ->          float[]       in `dtype`, `precision.loss`
    inside      `dtype`
    """
    logits_NV = logits_BTV[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits_NV.to(to_torch(dtype)), labels_BT[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")
