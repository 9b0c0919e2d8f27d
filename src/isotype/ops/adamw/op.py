"""`adamw_` updates one tensor, with one kernel on a GPU and in plain PyTorch elsewhere."""

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
        """Returns the factor by which the weight is multiplied for weight decay."""
        return 1 - self.lr * self.weight_decay

    @property
    def step_size(self) -> float:
        """Returns the step size, which includes the bias correction of the first moment."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def correction(self) -> float:
        """Returns the bias correction of the second moment."""
        return 1 / (1 - self.beta2**self.step)


BLOCK = 1 << 18  # number of elements whose noise comes from one random generator
_64_BITS = (1 << 64) - 1


def stochastic_round_(
    target_bf16: Tensor, value_fp32: Tensor, seed: int, first_index: int = 0
) -> None:
    """Rounds fp32 values to bf16 and writes them to the target. Each value is rounded up or down at
    random. The nearer number is more probable, so that the expected value is exact.

    16 random bits are added to the 16 bits that bf16 drops. If this addition carries into the upper
    16 bits, the value is rounded up. Values that bf16 represents exactly, and infinities, do not
    change.

    seed, first_index  arguments of `draw_noise_bits`
    """
    bits = value_fp32.view(torch.int32) + draw_noise_bits(
        seed, first_index, value_fp32.numel(), value_fp32.device
    ).view(value_fp32.shape)
    bits &= -65536
    rounded = bits.view(torch.float32)
    target_bf16.copy_(torch.where(value_fp32.isfinite(), rounded, value_fp32))


def draw_noise_bits(seed: int, first_index: int, count: int, device: torch.device) -> Tensor:
    """Returns 16 random bits for each of `count` elements from `first_index` on, as int32[count].
    The bits depend only on the seed and on the index of the element.

    Several processes may hold parts of one tensor. For each element, they then draw the same bits
    as a single process that holds the whole tensor. Each block of BLOCK elements has a separate
    random generator.
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
    """Returns a seed whose lower 32 bits depend on every bit of both arguments. torch's CPU
    generator reads only these 32 bits.

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

    seed         seed of the noise that rounds a bf16 weight stochastically; None rounds to nearest
    first_index  index of the first element in the whole tensor, if the tensors are parts of larger
                 ones
    """
    h = hyperparameters
    g_fp32 = gradient.float()
    mean_fp32 = mean.float().lerp_(g_fp32, 1 - h.beta1)
    square_fp32 = square.float().mul_(h.beta2).addcmul_(g_fp32, g_fp32, value=1 - h.beta2)
    mean.copy_(mean_fp32)
    square.copy_(square_fp32)
    denominator = (square_fp32 / (1 - h.beta2**h.step)).sqrt_().add_(h.eps)
    # .float() of an fp32 weight returns the weight itself: the update is then in place and nothing
    # has to be stored
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
    """Computes one AdamW update in place, in fp32 for tensors of any dtype.

    weight        any float [*n]
    gradient      any float [*n]
    mean, square  any float [*n]   the moments
    seed          seed of the noise that rounds a bf16 weight stochastically; None for rounding to
                  nearest
    first_index   index of the first element in the whole tensor, if a process holds only a part of
                  it

    The kernel and plain PyTorch use different random numbers with the same distribution.
    """
    tensors = (weight, gradient, mean, square)
    is_supported = all(t.is_contiguous() and t.dtype != torch.float64 for t in tensors)
    # the kernel draws noise for four neighbouring elements at a time
    if uses_fused_kernel("adamw", weight) and is_supported and first_index % 4 == 0:
        _update(*tensors, hyperparameters[:-1], hyperparameters.step, seed, first_index)
    else:
        adamw_reference_(*tensors, hyperparameters, seed, first_index)
