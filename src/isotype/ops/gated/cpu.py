"""An activation, alone or times `up`, by the C++ kernels: fp32, bf16 or fp16, rows of any stride."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpp import CppKernels, as_rows
from ..library import library_op

KERNELS = CppKernels(__file__, forward="dpppiiiii", backward="dppppppiiiiii")
# their numbers in cpu.cpp
_NUMBERS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@library_op("gated_forward_cpp(Tensor x, Tensor? up, str activation) -> Tensor", fake=lambda x, up, activation: _like(x))
def gated_forward(x: Tensor, up: Tensor | None, activation: str) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype)
    if up is None:
        (x,) = as_rows(x)
    else:
        x, up = as_rows(x, up)
    KERNELS("forward", y.dtype, x, up, y, *x.shape, x.stride(0), 0 if up is None else up.stride(0), _NUMBERS[activation])
    return y


def _fake_backward(x: Tensor, up: Tensor | None, dy: Tensor, activation: str, product: bool) -> tuple[Tensor, Tensor, Tensor]:
    empty = (0,)
    return _like(x), x.new_empty(empty if up is None else up.shape), x.new_empty(x.shape if product else empty)


@library_op(
    "gated_backward_cpp(Tensor x, Tensor? up, Tensor dy, str activation, bool product) -> (Tensor, Tensor, Tensor)", fake=_fake_backward
)
def gated_backward(x: Tensor, up: Tensor | None, dy: Tensor, activation: str, product: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x and up, and the result again: what is not wanted is empty."""
    dx, dup, y = _fake_backward(x, up, dy, activation, product)
    if up is None:
        x, dy = as_rows(x, dy)
    else:
        x, up, dy = as_rows(x, up, dy)
    KERNELS(
        "backward", dx.dtype, x, up, dy, dx, None if up is None else dup, y if product else None,
        *x.shape, x.stride(0), 0 if up is None else up.stride(0), dy.stride(0), _NUMBERS[activation],
    )  # fmt: skip
    return dx, dup, y
