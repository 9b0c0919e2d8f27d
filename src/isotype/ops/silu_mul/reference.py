"""SwiGLU's product in plain PyTorch, right at fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from ..autocast import autocast_off, wide


def silu_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    with autocast_off(gate):
        g, u = gate.to(wide(gate.dtype)), up.to(wide(up.dtype))
        return (g * torch.sigmoid(g) * u).to(gate.dtype)
