"""The causal loss as a sum over supervised tokens, so that every mean is taken over tokens, once, by whoever knows how many there are."""

from __future__ import annotations

from contextlib import nullcontext

import torch.nn.functional as F
from torch import Tensor, nn

from ...data.rows import IGNORED
from ...dtypes import to_torch
from ...optimize import deferring
from .batches import Batch


def batch_loss_sum(model: nn.Module, batch: Batch, *, dtype: str = "fp32") -> Tensor:
    """The loss of a batch, summed over its supervised tokens: float[] in `dtype`, `precision.loss`.

    An optimized head hands out deferred logits here, so the logits are never held. Only fp32 losses do that: the fused loss is fp32 inside.
    """
    with deferring() if dtype == "fp32" else nullcontext():
        if batch.position_ids is not None and takes_one_row(model):
            batch = batch.as_one_row()
        logits = model(**batch.inputs).logits
        return token_loss_sum(logits, batch.labels, dtype=dtype)


def takes_one_row(model: nn.Module) -> bool:
    """Whether packed rows must lie in one row to be kept apart: FlashAttention's varlen path looks at positions of a single row only."""
    return "flash" in str(getattr(getattr(model, "config", None), "_attn_implementation", ""))


def token_loss_sum(logits_BTV: Tensor, labels_BT: Tensor, *, dtype: str = "fp32") -> Tensor:
    """Cross-entropy of each next token, summed.

    logits_BTV  float[B T V]
    labels_BT   int[B T]      -100 where there is no loss; the label at t is predicted at t - 1
    ->          float[]       in `dtype`, `precision.loss`
    inside      `dtype`
    """
    # the labels move, not the logits: those would be copied, and deferred ones made real
    targets_N = F.pad(labels_BT[:, 1:], (0, 1), value=IGNORED).flatten()
    logits_NV = logits_BTV.reshape(-1, logits_BTV.shape[-1])  # deferred logits stay deferred through a reshape
    return F.cross_entropy(logits_NV.to(to_torch(dtype)), targets_N, ignore_index=IGNORED, reduction="sum")
