"""`adamw_` updates one tensor in a single pass, with a C++ kernel on a CPU and a Triton kernel on a
GPU.

In plain PyTorch, the same update takes 16 operators and up to four fp32 copies of the tensor. The
kernels read and write each tensor once and allocate nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..backend import arithmetic_dtype, choose_implementation
from ..cpp import CppKernels
from ..library import library_op
from .noise import draw_noise_bits, noise_keys, stochastic_round_


class AdamwHyperparameters(NamedTuple):
    """The hyperparameters of AdamW (Loshchilov and Hutter 2019).

    step            the number of this update, counted from 1
    gradient_scale  a factor by which the gradient is multiplied, for example to clip it
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    gradient_scale: float = 1.0

    @property
    def decay_rate(self) -> float:
        """Returns the share of the weight that weight decay subtracts."""
        return self.lr * self.weight_decay

    @property
    def step_size(self) -> float:
        """Returns the step size, which includes the bias correction of the first moment."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def square_correction(self) -> float:
        """Returns the bias correction of the second moment."""
        return 1 / (1 - self.beta2**self.step)

    @property
    def kernel_numbers(self) -> tuple[float, ...]:
        """Returns the numbers that the kernels need, in the order of their arguments."""
        return (
            self.decay_rate,
            self.step_size,
            self.square_correction,
            self.beta1,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            self.eps,
            self.gradient_scale,
        )


# --- reference


def adamw_reference_(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    hyperparameters: AdamwHyperparameters,
    seed: int | None,
    first_index: int = 0,
) -> None:
    """Updates weight, mean and square in place, in plain PyTorch. The arguments are those of
    `adamw_`. It also supports fp64 tensors.
    """
    h = hyperparameters
    dtype = arithmetic_dtype(weight.dtype)
    g = gradient.to(dtype) * h.gradient_scale
    new_mean = mean.to(dtype) * h.beta1 + g * (1 - h.beta1)
    new_square = square.to(dtype) * h.beta2 + g * g * (1 - h.beta2)
    denominator = (new_square * h.square_correction).sqrt_().add_(h.eps)
    old_weight = weight.to(dtype)
    change = old_weight * h.decay_rate + new_mean * h.step_size / denominator
    targets = (weight, mean, square)
    values = (old_weight - change, new_mean, new_square)
    if seed is None or all(target.dtype != torch.bfloat16 for target in targets):
        for target, value in zip(targets, values):
            target.copy_(value)
        return
    noises = draw_noise_bits(seed, first_index, weight.numel(), weight.device)
    for target, value, noise in zip(targets, values, noises):
        if target.dtype == torch.bfloat16:
            stochastic_round_(target, value, noise.view(target.shape))
        else:
            target.copy_(value)


# number of elements that plain PyTorch updates at a time, so that its copies take at most 150 MB
CHUNK = 1 << 22


def _update_in_chunks(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    hyperparameters: AdamwHyperparameters,
    seed: int | None,
    first_index: int,
) -> None:
    """Computes `adamw_reference_` for CHUNK elements at a time."""
    if not all(t.is_contiguous() for t in tensors):
        adamw_reference_(*tensors, hyperparameters, seed, first_index)
        return
    chunks = zip(*(t.view(-1).split(CHUNK) for t in tensors))
    for number, (weight_chunk, gradient_chunk, mean_chunk, square_chunk) in enumerate(chunks):
        adamw_reference_(
            weight_chunk,
            gradient_chunk,
            mean_chunk,
            square_chunk,
            hyperparameters,
            seed,
            first_index + number * CHUNK,
        )


# --- the kernels

KERNELS = CppKernels(__file__, update="dddppppiiiiiifffffffff")


@library_op(
    "adamw_(Tensor(a!) weight, Tensor gradient, Tensor(b!) mean, Tensor(c!) square, float[]"
    " hyperparameters, int step, float gradient_scale, int? seed, int first_index) -> ()",
    fake=lambda *_: None,
)
def _update(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    hyperparameters: Sequence[float],
    step: int,
    gradient_scale: float,
    seed: int | None,
    first_index: int,
) -> None:
    numbers = AdamwHyperparameters._make((*hyperparameters, step, gradient_scale))
    tensors = (weight, gradient, mean, square)
    if choose_implementation(KERNELS, *tensors) == "triton":
        from . import triton

        triton.adamw_(*tensors, numbers, seed, first_index)
        return
    KERNELS(
        "update",
        weight.dtype,
        gradient.dtype,
        mean.dtype,
        *tensors,
        weight.numel(),
        first_index,
        seed is not None,
        *noise_keys(seed or 0),
        *numbers.kernel_numbers,
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
    mean, square  any float [*n]   the moments, both of the same dtype
    seed          seed of the random bits with which bf16 weights and moments are rounded
                  stochastically; None for rounding to nearest
    first_index   index of the first element in the whole tensor, if a process holds only a part of
                  it
    """
    tensors = (weight, gradient, mean, square)
    is_contiguous = all(t.is_contiguous() for t in tensors)
    if is_contiguous and choose_implementation(KERNELS, *tensors) in ("triton", "cpp"):
        h = hyperparameters
        _update(*tensors, h[:5], h.step, h.gradient_scale, seed, first_index)
    else:
        _update_in_chunks(tensors, hyperparameters, seed, first_index)
