"""The head and the loss in plain PyTorch: all logits at once, right at fp64."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..autocast import autocast_off, product_dtype
from ..cross_entropy.reference import cross_entropy_reference


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, **loss: object
) -> Tensor:
    """What `linear_cross_entropy` computes, differentiated by PyTorch; `loss` are the options of `cross_entropy`."""
    dtype = product_dtype(hidden, weight)
    with autocast_off(hidden):
        logits = F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        return cross_entropy_reference(logits, targets, **loss)  # type: ignore[arg-type]
