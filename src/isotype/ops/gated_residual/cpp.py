"""The gated residual by the C++ kernels: fp32, bf16 or fp16, the gate any of them. B pictures, T tokens, H hidden."""

from __future__ import annotations

import torch
from torch import Tensor

from ..by_picture import block_rows, fp32_vector, rows_of
from ..compiled import CppKernels
from ..library import library_op

KERNELS = CppKernels(__file__, forward="dppppiiiii", backward="dpppppiiiiii")


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@library_op("gated_residual_forward_cpp(Tensor residual, Tensor x, Tensor gate) -> Tensor", fake=lambda residual, x, gate: _like(x))
def _forward(residual_BTH: Tensor, x_BTH: Tensor, gate_BH: Tensor) -> Tensor:
    y_BTH, residual_RH, x_RH = _like(x_BTH), rows_of(residual_BTH), rows_of(x_BTH)
    KERNELS(
        "forward", x_RH.dtype, residual_RH, x_RH, fp32_vector(gate_BH), y_BTH,
        *x_RH.shape, residual_RH.stride(0), x_RH.stride(0), max(1, x_BTH.shape[1]),
    )  # fmt: skip
    return y_BTH


def _fake_backward(x_BTH: Tensor, gate_BH: Tensor, dy_BTH: Tensor, want_gate: bool) -> tuple[Tensor, Tensor]:
    return _like(x_BTH), gate_BH.new_empty(gate_BH.shape if want_gate else (0,))


@library_op("gated_residual_backward_cpp(Tensor x, Tensor gate, Tensor dy, bool want_gate) -> (Tensor, Tensor)", fake=_fake_backward)
def _backward(x_BTH: Tensor, gate_BH: Tensor, dy_BTH: Tensor, want_gate: bool) -> tuple[Tensor, Tensor]:
    pictures, tokens, hidden = x_BTH.shape
    x_RH, dy_RH, dx_BTH, block = rows_of(x_BTH), rows_of(dy_BTH), _like(x_BTH), block_rows(tokens)
    partial = torch.empty((pictures, -(-tokens // block), hidden), dtype=torch.float32) if want_gate else None
    KERNELS(
        "backward", x_RH.dtype, x_RH, fp32_vector(gate_BH), dy_RH, dx_BTH, partial,
        *x_RH.shape, x_RH.stride(0), dy_RH.stride(0), max(1, tokens), block,
    )  # fmt: skip
    # summed in fp32, and narrowed once
    return dx_BTH, gate_BH.new_empty(0) if partial is None else partial.sum(1).to(gate_BH.dtype)


def gated_residual_forward(residual_BTH: Tensor, x_BTH: Tensor, gate_BH: Tensor) -> Tensor:
    return _forward(residual_BTH, x_BTH, gate_BH)


def gated_residual_backward(x_BTH: Tensor, gate_BH: Tensor, dy_BTH: Tensor, *, want_gate: bool) -> tuple[Tensor, Tensor | None]:
    dx_BTH, dgate_BH = _backward(x_BTH, gate_BH, dy_BTH, want_gate)
    return dx_BTH, dgate_BH if want_gate else None
