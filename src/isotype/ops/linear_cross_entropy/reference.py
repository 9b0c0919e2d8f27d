"""The head and the loss in plain PyTorch: all logits at once, right at fp64."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..autocast import autocast_off, product_dtype
from ..cross_entropy.reference import cross_entropy_reference


def reference_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """All logits, in the dtype that the op's product has."""
    dtype = product_dtype(hidden, weight)
    with autocast_off(hidden):
        return F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def linear_cross_entropy_reference(hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, **loss: Any) -> Tensor:
    """What `linear_cross_entropy` computes, differentiated by PyTorch; `loss` are the options of `cross_entropy`."""
    return cross_entropy_reference(reference_logits(hidden, weight, bias), targets, **loss)
