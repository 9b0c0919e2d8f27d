"""Computes the relative error of an op's result, and the largest error that is allowed."""

from __future__ import annotations

import torch
from torch import Tensor

# An error may be this many times the error of plain PyTorch at the same dtypes.
MAX_RATIO = 2.0


def relative_error(result: Tensor, truth: Tensor) -> float:
    """Returns the norm of the difference, divided by the norm of the exact result. The error is
    infinite if the result has a value that is not finite.
    """
    if not torch.isfinite(result).all():
        return float("inf")
    difference = (result.detach().double() - truth.detach().double()).norm()
    return float(difference / truth.detach().double().norm().clamp_min(1e-30))


def allowed_error(plain_error: float, dtype: torch.dtype) -> float:
    """Returns the largest error that the op may have, which is `MAX_RATIO` times PyTorch's own
    error. An error below half a rounding step of the dtype, or below four rounding steps of fp32,
    is always allowed. Errors of this size are unavoidable: every result is rounded to the dtype,
    and the exponential functions of a GPU have an error of two rounding steps of fp32.
    """
    smallest = max(torch.finfo(dtype).eps / 2, 4 * torch.finfo(torch.float32).eps)
    return MAX_RATIO * max(plain_error, smallest)
