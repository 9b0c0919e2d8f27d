"""Bytes that the head's forward needs besides its results, for memory plans: one chunk of logits, and of their gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import function  # noqa: F401  registers the operator
from .products import operand_dtype, result_dtype


def scratch() -> dict[Any, Callable[..., int]]:
    """Operator -> bytes, from its arguments."""
    return {torch.ops.isotype.linear_cross_entropy_forward.default: _forward}


def _forward(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Any,
    targets_T: Tensor,
    upstream: Tensor,
    ignore_index: int,
    factors: Any,
    chunk: int,
    *want: bool,
) -> int:
    rows, classes = min(int(chunk), targets_T.numel()), weight_VH.shape[0]
    operand = operand_dtype(hidden_TH.dtype, hidden_TH.device)
    result = result_dtype(operand, hidden_TH.device)
    logits = rows * classes * result.itemsize
    gradient = rows * classes * operand.itemsize if result != operand and any(want[:3]) else 0
    # the head as the product's operand, where it is another dtype
    head = weight_VH.numel() * operand.itemsize if weight_VH.dtype != operand else 0
    return logits + gradient + head + 2 * rows * hidden_TH.shape[1] * result.itemsize
