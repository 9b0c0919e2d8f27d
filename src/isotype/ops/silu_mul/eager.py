"""silu(gate) * up and its backward as formulas: widen once, compute, narrow once."""

from __future__ import annotations

import torch
from torch import Tensor

from ..autocast import wide
from ..compiled import Fused


def forward_formula(gate: Tensor, up: Tensor) -> Tensor:
    g = gate.to(wide(gate.dtype))
    return (g * torch.sigmoid(g) * up.to(g.dtype)).to(gate.dtype)


def backward_formula(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    g = gate.to(wide(gate.dtype))
    u, d = up.to(g.dtype), dy.to(g.dtype)
    s = torch.sigmoid(g)
    return (d * u * s * (1 + g * (1 - s))).to(gate.dtype), (d * g * s).to(up.dtype)


def gradients_formula(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The backward and the product again, from one sigmoid."""
    g = gate.to(wide(gate.dtype))
    u, d = up.to(g.dtype), dy.to(g.dtype)
    s = torch.sigmoid(g)
    return (d * u * s * (1 + g * (1 - s))).to(gate.dtype), (d * g * s).to(up.dtype), (g * s * u).to(gate.dtype)


silu_mul_forward = Fused(forward_formula)
silu_mul_backward = Fused(backward_formula)
silu_mul_gradients = Fused(gradients_formula)
