"""The modulated LayerNorm and the gated residual by the C++ kernels: fp32, bf16 or fp16, each of x, vectors and output its own.

B pictures, T tokens, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpp import CppKernels
from ..library import library_op

KERNELS = CppKernels(
    __file__, norm_forward="ddppppiiiif", norm_backward="ddpppppiiiiiif", gate_forward="dppppiiiii", gate_backward="dpppppiiiiii"
)
# at most so many partial sums of a vector's gradient a picture, and no fewer rows in each than pay for one
_PARTIAL_SUMS, _ROWS = 64, 16


def _rows_of(x_BTH: Tensor) -> Tensor:
    """[B*T H], each row's values side by side in memory."""
    x_RH = x_BTH.reshape(-1, x_BTH.shape[-1])
    return x_RH if x_RH.stride(-1) == 1 else x_RH.contiguous()


def _fp32(vector_BH: Tensor, offset: float = 0.0) -> Tensor:
    v = vector_BH.to(torch.float32).contiguous()
    return v + offset if offset else v


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


@library_op(
    "modulated_layer_norm_forward_cpp(Tensor x, Tensor scale, Tensor shift, float eps, ScalarType out_dtype) -> Tensor",
    fake=lambda x, scale, shift, eps, out_dtype: _like(x, out_dtype),
)
def modulated_layer_norm_forward(x_BTH: Tensor, scale_BH: Tensor, shift_BH: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    y_BTH, x_RH = _like(x_BTH, out_dtype), _rows_of(x_BTH)
    KERNELS(
        "norm_forward", x_RH.dtype, out_dtype, x_RH, _fp32(scale_BH, 1.0), _fp32(shift_BH), y_BTH,
        *x_RH.shape, x_RH.stride(0), max(1, x_BTH.shape[1]), eps,
    )  # fmt: skip
    return y_BTH


def _fake_norm_backward(x_BTH: Tensor, scale_BH: Tensor, dy_BTH: Tensor, eps: float, want: bool) -> tuple[Tensor, Tensor, Tensor]:
    shape = scale_BH.shape if want else (0,)
    return _like(x_BTH), scale_BH.new_empty(shape), scale_BH.new_empty(shape)


@library_op(
    "modulated_layer_norm_backward_cpp(Tensor x, Tensor scale, Tensor dy, float eps, bool want_modulation) -> (Tensor, Tensor, Tensor)",
    fake=_fake_norm_backward,
)
def modulated_layer_norm_backward(
    x_BTH: Tensor, scale_BH: Tensor, dy_BTH: Tensor, eps: float, want_modulation: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, scale and shift; the last two are empty where not wanted."""
    pictures, tokens, hidden = x_BTH.shape
    x_RH, dy_RH, dx_BTH = _rows_of(x_BTH), _rows_of(dy_BTH), _like(x_BTH)
    block = max(_ROWS, -(-tokens // _PARTIAL_SUMS))
    partial = torch.empty((pictures, -(-tokens // block), 2, hidden), dtype=torch.float32) if want_modulation else None
    KERNELS(
        "norm_backward", x_RH.dtype, dy_RH.dtype, x_RH, _fp32(scale_BH, 1.0), dy_RH, dx_BTH, partial,
        *x_RH.shape, x_RH.stride(0), dy_RH.stride(0), max(1, tokens), block, eps,
    )  # fmt: skip
    if partial is None:
        return dx_BTH, scale_BH.new_empty(0), scale_BH.new_empty(0)
    # summed in fp32, and narrowed once; two tensors, since an operator's results share no memory
    dscale_BH, dshift_BH = (partial[:, :, i].sum(1).to(scale_BH.dtype) for i in range(2))
    return dx_BTH, dscale_BH, dshift_BH


@library_op("gated_residual_forward_cpp(Tensor residual, Tensor x, Tensor gate) -> Tensor", fake=lambda residual, x, gate: _like(x))
def gated_residual_forward(residual_BTH: Tensor, x_BTH: Tensor, gate_BH: Tensor) -> Tensor:
    y_BTH, residual_RH, x_RH = _like(x_BTH), _rows_of(residual_BTH), _rows_of(x_BTH)
    KERNELS(
        "gate_forward", x_RH.dtype, residual_RH, x_RH, _fp32(gate_BH), y_BTH,
        *x_RH.shape, residual_RH.stride(0), x_RH.stride(0), max(1, x_BTH.shape[1]),
    )  # fmt: skip
    return y_BTH


def _fake_gate_backward(x_BTH: Tensor, gate_BH: Tensor, dy_BTH: Tensor, want_gate: bool) -> tuple[Tensor, Tensor]:
    return _like(x_BTH), gate_BH.new_empty(gate_BH.shape if want_gate else (0,))


@library_op("gated_residual_backward_cpp(Tensor x, Tensor gate, Tensor dy, bool want_gate) -> (Tensor, Tensor)", fake=_fake_gate_backward)
def gated_residual_backward(x_BTH: Tensor, gate_BH: Tensor, dy_BTH: Tensor, want_gate: bool) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the gate, which is empty where not wanted; the residual's is dy."""
    pictures, tokens, hidden = x_BTH.shape
    x_RH, dy_RH, dx_BTH = _rows_of(x_BTH), _rows_of(dy_BTH), _like(x_BTH)
    block = max(_ROWS, -(-tokens // _PARTIAL_SUMS))
    partial = torch.empty((pictures, -(-tokens // block), hidden), dtype=torch.float32) if want_gate else None
    KERNELS(
        "gate_backward", x_RH.dtype, x_RH, _fp32(gate_BH), dy_RH, dx_BTH, partial,
        *x_RH.shape, x_RH.stride(0), dy_RH.stride(0), max(1, tokens), block,
    )  # fmt: skip
    # summed in fp32, and narrowed once
    return dx_BTH, gate_BH.new_empty(0) if partial is None else partial.sum(1).to(gate_BH.dtype)
