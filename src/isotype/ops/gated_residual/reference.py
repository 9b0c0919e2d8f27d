"""A residual and what is added to it through a gate, in plain PyTorch, right at fp64."""

from __future__ import annotations

from torch import Tensor

from ..autocast import autocast_off, wide


def gated_residual_reference(residual: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    with autocast_off(x):
        dtype = wide(x.dtype, gate.dtype)
        return (residual.to(dtype) + gate.to(dtype)[:, None] * x.to(dtype)).to(residual.dtype)
