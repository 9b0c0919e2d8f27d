"""What the ops that take hidden states and a head's weight share: checks of their arguments, and the gradients that are asked for.

T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import ShapeError, UsageError
from ..autocast import wide
from .chunked import stored_gradient_dtype


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int | None) -> None:
    """Raises  ShapeError SH001 unless hidden is [*n H], weight [V H] and bias [V]; UsageError for a chunk of less than one row."""
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[-1]:
        raise ShapeError(f"hidden {list(hidden.shape)} and weight {list(weight.shape)}: expected [*n H] and [V H]", code="SH001")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"bias {list(bias.shape)}: expected [{weight.shape[0]}]", code="SH001")
    if chunk is not None and chunk < 1:
        raise UsageError(f"chunk is {chunk}: expected 1 row or more")


def gradients_wanted(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[bool, bool, bool]:
    """Whether autograd will ask for the gradient of each."""
    on = torch.is_grad_enabled()
    return on and hidden.requires_grad, on and weight.requires_grad, on and bias is not None and bias.requires_grad


def like_gradients(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_T: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty gradients of hidden, weight and bias; the last two of `rest` say whether those of hidden and weight are wanted."""
    fp32 = wide(hidden_TH.dtype)
    return (
        hidden_TH.new_empty(hidden_TH.shape if rest[-2] else (0,), dtype=fp32),
        weight_VH.new_empty(weight_VH.shape if rest[-1] else (0,), dtype=stored_gradient_dtype(hidden_TH.dtype, hidden_TH.device)),
        weight_VH.new_empty(weight_VH.shape[0] if bias_V is not None else 0, dtype=fp32),
    )
