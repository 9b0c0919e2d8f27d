"""The gated products by name, with a backward that gives the product again: for a caller that saved gate and up alone.

`silu_mul` and `gelu_mul` stay the ops; this is what a larger autograd function puts inside itself, autograd and autocast being its own.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from .gelu_mul.function import paths as gelu_paths
from .silu_mul.function import paths as silu_paths

Gated = Literal["silu_mul", "gelu_mul exact", "gelu_mul tanh"]


def gated_product(kind: Gated, gate: Tensor, up: Tensor) -> Tensor:
    """activation(gate) * up, rounded once.

    gate, up  F[T I]
    ->        F[T I]
    """
    if kind == "silu_mul":
        return silu_paths(gate).silu_mul_forward(gate, up)
    return gelu_paths(gate).gelu_mul_forward(gate, up, tanh=kind == "gelu_mul tanh")


def gated_gradients(kind: Gated, gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of gate, gradient of up, the product itself), on a CPU in one pass.

    gate, up, dy  F[T I]
    """
    if kind == "silu_mul":
        return silu_paths(gate).silu_mul_gradients(gate, up, dy)
    return gelu_paths(gate).gelu_mul_gradients(gate, up, dy, tanh=kind == "gelu_mul tanh")
