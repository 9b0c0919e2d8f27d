"""silu(gate) * up by the C++ kernels: fp32, bf16 or fp16, rows of any stride."""

from __future__ import annotations

import torch
from torch import Tensor

from ..compiled import CppKernels, as_rows
from ..library import library_op

KERNELS = CppKernels(__file__, forward="dpppiiii", backward="dppppppiiiii")


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@library_op("silu_mul_forward_cpp(Tensor gate, Tensor up) -> Tensor", fake=lambda gate, up: _like(gate))
def silu_mul_forward(gate: Tensor, up: Tensor) -> Tensor:
    y = _like(gate)
    g, u = as_rows(gate, up)
    KERNELS("forward", y.dtype, g, u, y, *g.shape, g.stride(0), u.stride(0))
    return y


@library_op(
    "silu_mul_backward_cpp(Tensor gate, Tensor up, Tensor dy) -> (Tensor, Tensor)", fake=lambda gate, up, dy: (_like(gate), _like(up))
)
def silu_mul_backward(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = _like(gate), _like(up)
    g, u, d = as_rows(gate, up, dy)
    KERNELS("backward", dgate.dtype, g, u, d, dgate, dup, None, *g.shape, g.stride(0), u.stride(0), d.stride(0))
    return dgate, dup


@library_op(
    "silu_mul_gradients_cpp(Tensor gate, Tensor up, Tensor dy) -> (Tensor, Tensor, Tensor)",
    fake=lambda gate, up, dy: (_like(gate), _like(up), _like(gate)),
)
def silu_mul_gradients(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients, and the product computed again from the same sigmoid."""
    dgate, dup, y = _like(gate), _like(up), _like(gate)
    g, u, d = as_rows(gate, up, dy)
    KERNELS("backward", dgate.dtype, g, u, d, dgate, dup, y, *g.shape, g.stride(0), u.stride(0), d.stride(0))
    return dgate, dup, y
