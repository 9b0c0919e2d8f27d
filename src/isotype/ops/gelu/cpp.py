"""gelu(x) by the C++ kernels: fp32, bf16 or fp16, rows of any stride, exact or by tanh."""

from __future__ import annotations

import torch
from torch import Tensor

from ..compiled import CppKernels, as_rows
from ..library import library_op

KERNELS = CppKernels(__file__, forward="dppiiii", backward="dpppiiiii")


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@library_op("gelu_forward_cpp(Tensor x, bool tanh) -> Tensor", fake=lambda x, tanh: _like(x))
def _forward(x: Tensor, tanh: bool) -> Tensor:
    y = _like(x)
    (rows,) = as_rows(x)
    KERNELS("forward", y.dtype, rows, y, *rows.shape, rows.stride(0), tanh)
    return y


@library_op("gelu_backward_cpp(Tensor x, Tensor dy, bool tanh) -> Tensor", fake=lambda x, dy, tanh: _like(x))
def _backward(x: Tensor, dy: Tensor, tanh: bool) -> Tensor:
    dx = _like(x)
    rows, slopes = as_rows(x, dy)
    KERNELS("backward", dx.dtype, rows, slopes, dx, *rows.shape, rows.stride(0), slopes.stride(0), tanh)
    return dx


def gelu_forward(x: Tensor, *, tanh: bool) -> Tensor:
    return _forward(x, tanh)


def gelu_backward(x: Tensor, dy: Tensor, *, tanh: bool) -> Tensor:
    return _backward(x, dy, tanh)
