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
    "float weight_decay, int step, int? seed, int first) -> ()",
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
    first: int,
) -> None:
    from . import kernels

    kernels.adamw_(weight, gradient, mean, square, AdamwNumbers(lr, beta1, beta2, eps, weight_decay, step), seed, first)


def adamw_(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, numbers: AdamwNumbers, *, seed: int | None, first: int = 0
) -> None:
    """One AdamW update in place, in fp32 whatever the tensors' dtypes.

    weight        any float [*n]
    gradient      any float [*n]
    mean, square  any float [*n]   the moments
    seed          of the noise that rounds a bf16 weight stochastically; None for rounding to nearest
    first         index of the tensors' first element in the whole ones, where they are one process's parts of them

    The kernel and plain PyTorch draw different noise of the same distribution.
    """
    tensors = (weight, gradient, mean, square)
    plain = all(t.is_contiguous() and t.dtype != torch.float64 for t in tensors)
    # the kernel draws for four neighbours at a time
    if fused_runs(weight) and plain and first % 4 == 0:
        n = numbers
        _update(*tensors, n.lr, n.beta1, n.beta2, n.eps, n.weight_decay, n.step, seed, first)
    else:
        adamw_reference_(*tensors, numbers, seed, first)
