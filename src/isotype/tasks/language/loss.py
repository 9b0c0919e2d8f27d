"""The causal loss as a sum over supervised tokens. The caller, which knows the number of tokens in the whole step, divides once."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...data.rows import IGNORED
from ...dtypes import to_torch
from ...environment.planned import stands_for
from ...ops.attention import Documents
from ...optimize import deferring
from ...optimize.attention import DocumentMask, mask_needs
from .batches import Batch


def batch_loss_sum(model: nn.Module, batch: Batch, *, dtype: str = "fp32") -> Tensor:
    """The loss of a batch, summed over its supervised tokens: float[] in `dtype`, `precision.loss`.

    With an optimized head and an fp32 loss, the logits are deferred and never stored in full; the fused loss computes in fp32.
    """
    with deferring() if dtype == "fp32" else nullcontext():
        if batch.position_ids is not None and takes_one_row(model):
            batch = batch.as_one_row()
        logits = model(**model_inputs(model, batch)).logits
        return token_loss_sum(logits, batch.labels, dtype=dtype, counted=batch.counted)


def model_inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """What the model's forward is given: the smallest mask with which every supervised token sees what it should.

    Right padding needs none under causal attention: no real token attends to what comes after it, and nothing is counted of padding. A mask
    costs the fast kernels, so that models keep one only where they read it otherwise. On a GPU packed documents are told apart by their
    bounds, which also let windows and softcaps run in kernels.
    """
    inputs = batch.inputs
    if batch.position_ids is not None and reads_grids(model):
        # the first row keeps documents apart, the others are time, height and width: of text they are equal
        inputs["position_ids"] = batch.position_ids.expand(4, -1, -1)
    if stands_for(batch.input_ids.device) == "cuda" and not mask_needs(model).why_no_documents:
        documents = batch.documents or Documents.rows(batch.input_ids.shape[0], batch.input_ids.shape[1], batch.input_ids.device)
        return inputs | {"attention_mask": DocumentMask(documents)}
    if batch.attention_mask is not None and not mask_needs(model).why_read:
        return inputs | {"attention_mask": None}
    return inputs


def reads_grids(model: nn.Module) -> bool:
    """Whether the model's positions have rows for time, height and width, as those of Qwen's vision-language models do. Given one row of
    packed positions, Qwen2.5-VL would see one document."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    return "mrope_section" in (getattr(text, "rope_parameters", None) or {})


def takes_one_row(model: nn.Module) -> bool:
    """Whether packed rows must lie in one row to be kept apart: FlashAttention's varlen path looks at positions of a single row only."""
    return "flash" in str(getattr(getattr(model, "config", None), "_attn_implementation", ""))


def token_loss_sum(logits_BTV: Tensor, labels_BT: Tensor, *, dtype: str = "fp32", counted: Tensor | None = None) -> Tensor:
    """Cross-entropy of each next token, summed.

    logits_BTV  float[B T V]
    labels_BT   int[B T]      -100 where there is no loss; the label at t is predicted at t - 1
    counted     int[N]        the flattened positions whose next token is supervised; where given, and the device is not a CPU, only those
                              rows are computed. On a CPU the loss finds them itself
    ->          float[]       in `dtype`, `precision.loss`
    inside      `dtype`
    """
    # the labels move, not the logits: those would be copied, and deferred ones made real
    targets_N = F.pad(labels_BT[:, 1:], (0, 1), value=IGNORED).flatten()
    logits_NV = logits_BTV.reshape(-1, logits_BTV.shape[-1])  # deferred logits stay deferred through a reshape
    if counted is not None and stands_for(labels_BT.device) != "cpu":
        logits_NV, targets_N = logits_NV.index_select(0, counted), targets_N.index_select(0, counted)
    return F.cross_entropy(logits_NV.to(to_torch(dtype)), targets_N, ignore_index=IGNORED, reduction="sum")
