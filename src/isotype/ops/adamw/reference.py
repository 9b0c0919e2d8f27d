"""AdamW's update of one tensor in plain PyTorch: fp32 arithmetic, for weight, gradient and moments of any dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from .numbers import AdamwNumbers


def stochastic_round_(target_bf16: Tensor, value_fp32: Tensor, generator: torch.Generator) -> None:
    """Writes fp32 into bf16, up or down with probability by distance, so that the mean is kept.

    The 16 bits that bf16 drops are added to 16 random bits; a carry rounds up. Exact values stay; infinities stay.
    """
    noise = torch.randint(0, 1 << 16, value_fp32.shape, dtype=torch.int32, device=value_fp32.device, generator=generator)
    bits = value_fp32.view(torch.int32) + noise
    bits &= -65536
    rounded = bits.view(torch.float32)
    target_bf16.copy_(torch.where(value_fp32.isfinite(), rounded, value_fp32))


def adamw_reference_(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, numbers: AdamwNumbers, generator: torch.Generator | None
) -> None:
    """Updates weight, mean and square in place; `generator` rounds a bf16 weight stochastically, None to nearest."""
    n = numbers
    g_fp32 = gradient.float()
    mean_fp32 = mean.float().lerp_(g_fp32, 1 - n.beta1)
    square_fp32 = square.float().mul_(n.beta2).addcmul_(g_fp32, g_fp32, value=1 - n.beta2)
    mean.copy_(mean_fp32)
    square.copy_(square_fp32)
    denominator = (square_fp32 / (1 - n.beta2**n.step)).sqrt_().add_(n.eps)
    # .float() of an fp32 weight is the weight itself: the update is then in place and there is nothing to store
    weight_fp32 = weight.float()
    weight_fp32.mul_(1 - n.lr * n.weight_decay)
    weight_fp32.addcdiv_(mean_fp32, denominator, value=-n.lr / (1 - n.beta1**n.step))
    if weight.dtype == torch.float32:
        return
    if generator is not None:
        stochastic_round_(weight, weight_fp32, generator)
    else:
        weight.copy_(weight_fp32)
