"""The modulated LayerNorm by the C++ kernels: fp32, bf16 or fp16, each of x, modulation and output its own.

B pictures, T tokens, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..by_picture import block_rows, fp32_vector, rows_of
from ..compiled import CppKernels
from ..library import library_op

KERNELS = CppKernels(__file__, forward="ddppppiiiif", backward="ddpppppiiiiiif")


def _fake_forward(x_BTH: Tensor, scale_BH: Tensor, shift_BH: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    return torch.empty(x_BTH.shape, dtype=out_dtype, device=x_BTH.device)


@library_op(
    "modulated_layer_norm_forward_cpp(Tensor x, Tensor scale, Tensor shift, float eps, ScalarType out_dtype) -> Tensor",
    fake=_fake_forward,
)
def _forward(x_BTH: Tensor, scale_BH: Tensor, shift_BH: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    y_BTH, x_RH = _fake_forward(x_BTH, scale_BH, shift_BH, eps, out_dtype), rows_of(x_BTH)
    KERNELS(
        "forward", x_RH.dtype, out_dtype, x_RH, fp32_vector(scale_BH, 1.0), fp32_vector(shift_BH), y_BTH,
        *x_RH.shape, x_RH.stride(0), max(1, x_BTH.shape[1]), eps,
    )  # fmt: skip
    return y_BTH


def _fake_backward(x_BTH: Tensor, scale_BH: Tensor, dy_BTH: Tensor, eps: float, want_modulation: bool) -> tuple[Tensor, Tensor, Tensor]:
    dx_BTH = torch.empty(x_BTH.shape, dtype=x_BTH.dtype, device=x_BTH.device)
    shape = scale_BH.shape if want_modulation else (0,)
    return dx_BTH, scale_BH.new_empty(shape), scale_BH.new_empty(shape)


@library_op(
    "modulated_layer_norm_backward_cpp(Tensor x, Tensor scale, Tensor dy, float eps, bool want_modulation) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
)
def _backward(x_BTH: Tensor, scale_BH: Tensor, dy_BTH: Tensor, eps: float, want_modulation: bool) -> tuple[Tensor, Tensor, Tensor]:
    pictures, tokens, hidden = x_BTH.shape
    x_RH, dy_RH, dx_BTH = rows_of(x_BTH), rows_of(dy_BTH), torch.empty(x_BTH.shape, dtype=x_BTH.dtype)
    block = block_rows(tokens)
    partial = torch.empty((pictures, -(-tokens // block), 2, hidden), dtype=torch.float32) if want_modulation else None
    KERNELS(
        "backward", x_RH.dtype, dy_RH.dtype, x_RH, fp32_vector(scale_BH, 1.0), dy_RH, dx_BTH, partial,
        *x_RH.shape, x_RH.stride(0), dy_RH.stride(0), max(1, tokens), block, eps,
    )  # fmt: skip
    if partial is None:
        return dx_BTH, scale_BH.new_empty(0), scale_BH.new_empty(0)
    # summed in fp32, and narrowed once; two tensors, since an operator's results share no memory
    dscale_BH, dshift_BH = (partial[:, :, i].sum(1).to(scale_BH.dtype) for i in range(2))
    return dx_BTH, dscale_BH, dshift_BH


def modulated_layer_norm_forward(x_BTH: Tensor, scale_BH: Tensor, shift_BH: Tensor, *, eps: float, out_dtype: torch.dtype) -> Tensor:
    return _forward(x_BTH, scale_BH, shift_BH, eps, out_dtype)


def modulated_layer_norm_backward(
    x_BTH: Tensor, scale_BH: Tensor, dy_BTH: Tensor, *, eps: float, want_modulation: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dx_BTH, dscale_BH, dshift_BH = _backward(x_BTH, scale_BH, dy_BTH, eps, want_modulation)
    return (dx_BTH, dscale_BH, dshift_BH) if want_modulation else (dx_BTH, None, None)
