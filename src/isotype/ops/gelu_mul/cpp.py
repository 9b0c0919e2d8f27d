"""gelu(gate) * up by the C++ kernels: fp32, bf16 or fp16, rows of any stride, exact or by tanh."""

from __future__ import annotations

import torch
from torch import Tensor

from ..compiled import CppKernels, as_rows
from ..library import library_op

KERNELS = CppKernels(__file__, forward="dpppiiiii", backward="dppppppiiiiii")


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@library_op("gelu_mul_forward_cpp(Tensor gate, Tensor up, bool tanh) -> Tensor", fake=lambda gate, up, tanh: _like(gate))
def _forward(gate: Tensor, up: Tensor, tanh: bool) -> Tensor:
    y = _like(gate)
    g, u = as_rows(gate, up)
    KERNELS("forward", y.dtype, g, u, y, *g.shape, g.stride(0), u.stride(0), tanh)
    return y


@library_op(
    "gelu_mul_backward_cpp(Tensor gate, Tensor up, Tensor dy, bool tanh) -> (Tensor, Tensor)",
    fake=lambda gate, up, dy, tanh: (_like(gate), _like(up)),
)
def _backward(gate: Tensor, up: Tensor, dy: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    dgate, dup = _like(gate), _like(up)
    g, u, d = as_rows(gate, up, dy)
    KERNELS("backward", dgate.dtype, g, u, d, dgate, dup, None, *g.shape, g.stride(0), u.stride(0), d.stride(0), tanh)
    return dgate, dup


@library_op(
    "gelu_mul_gradients_cpp(Tensor gate, Tensor up, Tensor dy, bool tanh) -> (Tensor, Tensor, Tensor)",
    fake=lambda gate, up, dy, tanh: (_like(gate), _like(up), _like(gate)),
)
def _gradients(gate: Tensor, up: Tensor, dy: Tensor, tanh: bool) -> tuple[Tensor, Tensor, Tensor]:
    dgate, dup, y = _like(gate), _like(up), _like(gate)
    g, u, d = as_rows(gate, up, dy)
    KERNELS("backward", dgate.dtype, g, u, d, dgate, dup, y, *g.shape, g.stride(0), u.stride(0), d.stride(0), tanh)
    return dgate, dup, y


def gelu_mul_forward(gate: Tensor, up: Tensor, *, tanh: bool) -> Tensor:
    return _forward(gate, up, tanh)


def gelu_mul_backward(gate: Tensor, up: Tensor, dy: Tensor, *, tanh: bool) -> tuple[Tensor, Tensor]:
    return _backward(gate, up, dy, tanh)


def gelu_mul_gradients(gate: Tensor, up: Tensor, dy: Tensor, *, tanh: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The backward, and the product again from the same exp."""
    return _gradients(gate, up, dy, tanh)
