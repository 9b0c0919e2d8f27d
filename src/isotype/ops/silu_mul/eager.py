"""silu(gate) * up and its backward as formulas: widen once, compute, narrow once."""

from __future__ import annotations

import torch
from torch import Tensor

from ..autocast import narrowed, wide


def silu_mul_forward(gate: Tensor, up: Tensor) -> Tensor:
    g = gate.to(wide(gate.dtype))
    return narrowed(g * torch.sigmoid(g) * up.to(g.dtype), gate.dtype)


def silu_mul_backward(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    g = gate.to(wide(gate.dtype))
    u, d = up.to(g.dtype), dy.to(g.dtype)
    s = torch.sigmoid(g)
    return (d * u * s * (1 + g * (1 - s))).to(gate.dtype), (d * g * s).to(up.dtype)


def silu_mul_gradients(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients, and the product computed again."""
    return *silu_mul_backward(gate, up, dy), silu_mul_forward(gate, up)
