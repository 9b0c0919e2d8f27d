"""What the op tests share: an error, and how many times that of plain PyTorch's it may be."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# The op's error against fp64 may be this many times that of the plain ops at the same dtypes: one factor for every op, output and gradient.
FACTOR = 2.0


def error(got: Tensor, truth: Tensor) -> float:
    """Relative error in the norm; nan and inf are infinitely wrong."""
    got, truth = got.detach().double(), truth.detach().double()
    if not torch.isfinite(got).all():
        return float("inf")
    return float((got - truth).norm() / truth.norm().clamp_min(1e-30))


def floor(*dtypes: torch.dtype | None) -> float:
    """Half a rounding step of the narrowest dtype involved: below it no implementation can be told from another."""
    return max(torch.finfo(d).eps for d in dtypes if d is not None) / 2


def plain_weighted(x, w, b, targets, reduction, class_weights, token_weights, smoothing, scale, z_loss):
    """A loss with weights of classes and tokens in plain PyTorch."""
    z = F.linear(x, w, b) * scale
    loss = F.cross_entropy(z, targets, weight=class_weights, label_smoothing=smoothing, reduction="none")
    loss = loss + z_loss * torch.logsumexp(z, -1).square().masked_fill(targets == -100, 0.0)
    if token_weights is not None:
        loss = loss * token_weights
    if reduction == "none":
        return loss
    counted = torch.ones_like(loss) if token_weights is None else token_weights
    counted = counted if class_weights is None else counted * class_weights[targets.clamp(min=0)]
    total = loss.sum()
    return total if reduction == "sum" else total / counted.masked_fill(targets == -100, 0.0).sum()
