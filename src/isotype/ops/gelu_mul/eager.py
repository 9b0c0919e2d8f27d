"""gelu(gate) * up and its backward as formulas: widen once, compute, narrow once."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autocast import narrowed, wide

_ROOT = math.sqrt(2 / math.pi)
_CUBE = 0.044715


def value_and_slope(g: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """gelu(g) and its derivative from one erf or tanh: on a CPU that is what the formula costs."""
    if tanh:
        t = torch.tanh(_ROOT * (g + _CUBE * g * g * g))
        half = 0.5 * (1 + t)
        return g * half, half + 0.5 * g * (1 - t * t) * _ROOT * (1 + 3 * _CUBE * g * g)
    half = 0.5 * (1 + torch.erf(g * math.sqrt(0.5)))
    return g * half, half + g * torch.exp(-0.5 * g * g) * (1 / math.sqrt(2 * math.pi))


def gelu_mul_forward(gate: Tensor, up: Tensor, *, tanh: bool) -> Tensor:
    g = gate.to(wide(gate.dtype))
    return narrowed(F.gelu(g, approximate="tanh" if tanh else "none") * up.to(g.dtype), gate.dtype)


def gelu_mul_backward(gate: Tensor, up: Tensor, dy: Tensor, *, tanh: bool) -> tuple[Tensor, Tensor]:
    g = gate.to(wide(gate.dtype))
    d = dy.to(g.dtype)
    y, slope = value_and_slope(g, tanh)
    return (d * up.to(g.dtype) * slope).to(gate.dtype), (d * y).to(up.dtype)


def gelu_mul_gradients(gate: Tensor, up: Tensor, dy: Tensor, *, tanh: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The backward, and the product again."""
    return *gelu_mul_backward(gate, up, dy, tanh=tanh), gelu_mul_forward(gate, up, tanh=tanh)
