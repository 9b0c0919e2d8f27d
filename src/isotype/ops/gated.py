"""The gated products by name, with a backward that gives the product again: for a caller that saved gate and up alone.

`silu_mul` and `gelu_mul` stay the ops; these functions are for use inside a larger autograd function, which handles autograd and autocast
itself.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from .backend import fused_runs
from .gelu_mul.function import paths as gelu_paths
from .library import library_op
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


def gated_gradients_(kind: Gated, gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `gated_gradients`, for a caller that owns all three: with kernels on a GPU the results are written over them, in their order."""
    if fused_runs(gate) and all(t.is_contiguous() and t.dtype == gate.dtype for t in (gate, up, dy)):
        _overwrite(gate, up, dy, kind)
        return gate, up, dy
    return gated_gradients(kind, gate, up, dy)


@library_op("gated_gradients_(Tensor(a!) gate, Tensor(b!) up, Tensor(c!) dy, str kind) -> ()", fake=lambda *_: None)
def _overwrite(gate: Tensor, up: Tensor, dy: Tensor, kind: Gated) -> None:
    if kind == "silu_mul":
        from .silu_mul import kernels as silu

        silu.silu_mul_gradients_(gate, up, dy)
    else:
        from .gelu_mul import kernels as gelu

        gelu.gelu_mul_gradients_(gate, up, dy, tanh=kind == "gelu_mul tanh")
