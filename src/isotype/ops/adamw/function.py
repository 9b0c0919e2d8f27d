"""`adamw_`: the update of one tensor, by one kernel on a GPU and by plain PyTorch elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backend import fused_runs
from ..library import library_op
from .numbers import AdamwNumbers
from .reference import adamw_reference_


@library_op(
    "adamw_(Tensor(a!) weight, Tensor gradient, Tensor(b!) mean, Tensor(c!) square, float lr, float beta1, float beta2, float eps, "
    "float weight_decay, int step, int? seed) -> ()",
    fake=lambda *_: None,
)
def _update(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    seed: int | None,
) -> None:
    from . import kernels

    kernels.adamw_(weight, gradient, mean, square, AdamwNumbers(lr, beta1, beta2, eps, weight_decay, step), seed)


def adamw_(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, numbers: AdamwNumbers, *, seed: int, generator: torch.Generator | None
) -> None:
    """One AdamW update in place, in fp32 whatever the tensors' dtypes.

    weight        any float [*n]
    gradient      any float [*n]
    mean, square  any float [*n]   the moments
    seed          of the kernel's noise, where there is a generator
    generator     of the noise with which plain PyTorch rounds a bf16 weight stochastically; None for rounding to nearest

    The kernel and plain PyTorch draw different noise of the same distribution.
    """
    tensors = (weight, gradient, mean, square)
    if fused_runs(weight) and all(t.is_contiguous() for t in tensors) and all(t.dtype != torch.float64 for t in tensors):
        _update(*tensors, *numbers, seed if generator is not None else None)
    else:
        adamw_reference_(*tensors, numbers, generator)
