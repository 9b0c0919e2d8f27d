"""gelu(x) and its backward as formulas: widen once, compute, narrow once."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..autocast import narrowed, wide
from ..gelu_mul.eager import value_and_slope


def gelu_forward(x: Tensor, *, tanh: bool) -> Tensor:
    return narrowed(F.gelu(x.to(wide(x.dtype)), approximate="tanh" if tanh else "none"), x.dtype)


def gelu_backward(x: Tensor, dy: Tensor, *, tanh: bool) -> Tensor:
    g = x.to(wide(x.dtype))
    _, slope = value_and_slope(g, tanh)
    return (dy.to(g.dtype) * slope).to(x.dtype)
