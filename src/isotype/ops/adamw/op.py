"""`adamw_`: the update of one tensor, by one kernel on a GPU and by plain PyTorch elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..backend import uses_fused_kernel
from ..library import library_op


class AdamwHyperparameters(NamedTuple):
    """The hyperparameters of AdamW (Loshchilov and Hutter 2019); `step` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int

    @property
    def decay(self) -> float:
        """The factor of the weight decay."""
        return 1 - self.lr * self.weight_decay

    @property
    def step_size(self) -> float:
        """The size of the step, with the first moment's bias correction."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def correction(self) -> float:
        """The bias correction of the second moment."""
        return 1 / (1 - self.beta2**self.step)


BLOCK = 1 << 18  # elements whose noise is drawn at a time
_64_BITS = (1 << 64) - 1


def stochastic_round_(
    target_bf16: Tensor, value_fp32: Tensor, seed: int, first_index: int = 0
) -> None:
    """Writes fp32 into bf16, up or down with probability by distance, so that the mean is kept.

    The 16 bits that bf16 drops are added to 16 random bits; a carry rounds up. Exact values stay;
    infinities stay.

    seed, first_index  of the noise, as in `noise`
    """
    bits = value_fp32.view(torch.int32) + noise(
        seed, first_index, value_fp32.numel(), value_fp32.device
    ).view(value_fp32.shape)
    bits &= -65536
    rounded = bits.view(torch.float32)
    target_bf16.copy_(torch.where(value_fp32.isfinite(), rounded, value_fp32))


def noise(seed: int, first_index: int, count: int, device: torch.device) -> Tensor:
    """16 random bits for each of `count` elements from `first_index` on: int32[count], a function
    of seed and element alone.

    So processes that share a tensor draw the same bits as one process would. Each block of BLOCK
    elements has its own generator.
    """
    if device.type == "meta":
        return torch.empty(count, dtype=torch.int32, device=device)
    generator = torch.Generator(device)
    blocks = []
    for block in range(first_index // BLOCK, -(-(first_index + count) // BLOCK)):
        begin = max(first_index, block * BLOCK)
        end = min(first_index + count, (block + 1) * BLOCK)
        generator.manual_seed(_mix_seed(seed, block))
        bits = torch.randint(
            0,
            1 << 16,
            (end - block * BLOCK,),
            dtype=torch.int32,
            device=device,
            generator=generator,
        )
        blocks.append(bits[begin - block * BLOCK :])
    if blocks:
        return torch.cat(blocks)
    return torch.empty(0, dtype=torch.int32, device=device)


def _mix_seed(seed: int, block: int) -> int:
    """A seed whose lower 32 bits depend on every bit of both numbers: torch's CPU generator reads
    no others.

    Source: SplitMix64, Steele et al. 2014, "Fast splittable pseudorandom number generators".
    """
    state = (seed * 0x9E3779B97F4A7C15 + (block + 1) * 0xD1B54A32D192ED03) & _64_BITS
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _64_BITS
    return (state ^ state >> 31) & 0x7FFFFFFFFFFFFFFF


def adamw_reference_(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    hyperparameters: AdamwHyperparameters,
    seed: int | None,
    first_index: int = 0,
) -> None:
    """Updates weight, mean and square in place.

    seed   of the noise that rounds a bf16 weight stochastically; None rounds to nearest
    first_index  index of the tensors' first element in the whole ones, where they are parts
    """
    h = hyperparameters
    g_fp32 = gradient.float()
    mean_fp32 = mean.float().lerp_(g_fp32, 1 - h.beta1)
    square_fp32 = square.float().mul_(h.beta2).addcmul_(g_fp32, g_fp32, value=1 - h.beta2)
    mean.copy_(mean_fp32)
    square.copy_(square_fp32)
    denominator = (square_fp32 / (1 - h.beta2**h.step)).sqrt_().add_(h.eps)
    # .float() of an fp32 weight is the weight itself: the update is then in place and there is
    # nothing to store
    weight_fp32 = weight.float()
    weight_fp32.mul_(1 - h.lr * h.weight_decay)
    weight_fp32.addcdiv_(mean_fp32, denominator, value=-h.lr / (1 - h.beta1**h.step))
    if weight.dtype == torch.float32:
        return
    if seed is not None:
        stochastic_round_(weight, weight_fp32, seed, first_index)
    else:
        weight.copy_(weight_fp32)


@library_op(
    "adamw_(Tensor(a!) weight, Tensor gradient, Tensor(b!) mean, Tensor(c!) square, float[]"
    " hyperparameters, int step, int? seed, int first_index) -> ()",
    fake=lambda *_: None,
)
def _update(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    hyperparameters: Sequence[float],
    step: int,
    seed: int | None,
    first_index: int,
) -> None:
    from . import triton

    triton.adamw_(
        weight,
        gradient,
        mean,
        square,
        AdamwHyperparameters._make((*hyperparameters, step)),
        seed,
        first_index,
    )


def adamw_(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    hyperparameters: AdamwHyperparameters,
    *,
    seed: int | None,
    first_index: int = 0,
) -> None:
    """One AdamW update in place, in fp32 whatever the tensors' dtypes.

    weight        any float [*n]
    gradient      any float [*n]
    mean, square  any float [*n]   the moments
    seed          of the noise that rounds a bf16 weight stochastically; None for rounding to
                  nearest
    first_index   index of the tensors' first element in the whole ones, where they are one
                  process's parts of them

    The kernel and plain PyTorch draw different noise of the same distribution.
    """
    tensors = (weight, gradient, mean, square)
    is_supported = all(t.is_contiguous() and t.dtype != torch.float64 for t in tensors)
    # the kernel draws for four neighbours at a time
    if uses_fused_kernel(weight) and is_supported and first_index % 4 == 0:
        _update(*tensors, hyperparameters[:-1], hyperparameters.step, seed, first_index)
    else:
        adamw_reference_(*tensors, hyperparameters, seed, first_index)
