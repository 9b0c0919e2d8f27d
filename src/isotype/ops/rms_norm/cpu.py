"""RMSNorm by the C++ kernels: fp32, bf16 or fp16, each of x, weight and output its own. H hidden."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpp import CppKernels
from ..library import library_op

KERNELS = CppKernels(__file__, forward="ddppppppiiiif", backward="ddpppppppiiiiii")
# most partial sums of the weight's gradient, and the fewest rows that are worth a partial sum
_PARTIAL_SUMS, _ROWS = 64, 16


def _fake_forward(
    x: Tensor, residual: Tensor | None, weight_H: Tensor, eps: float, unit_offset: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    scale = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    total = torch.empty(x.shape if residual is not None else (0,), dtype=x.dtype, device=x.device)
    return torch.empty(x.shape, dtype=out_dtype, device=x.device), scale, total


@library_op(
    "rms_norm_forward_cpp(Tensor x, Tensor? residual, Tensor weight, float eps, bool unit_offset, ScalarType out_dtype) "
    "-> (Tensor, Tensor, Tensor)",
    fake=_fake_forward,
)
def rms_norm_forward(
    x: Tensor, residual: Tensor | None, weight_H: Tensor, eps: float, unit_offset: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, 1 / rms of each row, x + residual, empty where there is none)"""
    y, scale, total = _fake_forward(x, residual, weight_H, eps, unit_offset, out_dtype)
    # rows of adjacent values; the weight in fp32
    x_TH, w_H = x.reshape(-1, x.shape[-1]), weight_H.to(torch.float32).contiguous()
    x_TH, w_H = x_TH if x_TH.stride(1) == 1 else x_TH.contiguous(), w_H + 1.0 if unit_offset else w_H
    other_TH = None if residual is None else residual.reshape(-1, residual.shape[-1])
    if other_TH is not None and other_TH.stride(1) != 1:
        other_TH = other_TH.contiguous()
    KERNELS(
        "forward", x.dtype, out_dtype, x_TH, other_TH, w_H, y, scale, total,
        *x_TH.shape, x_TH.stride(0), 0 if other_TH is None else other_TH.stride(0), eps,
    )  # fmt: skip
    return y, scale, total


def _fake_backward(
    x: Tensor, weight_H: Tensor, scale: Tensor, dy: Tensor, more: Tensor | None, unit_offset: bool, want_dweight: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), weight_H.new_empty(weight_H.shape if want_dweight else (0,))


@library_op(
    "rms_norm_backward_cpp(Tensor x, Tensor weight, Tensor scale, Tensor dy, Tensor? more, bool unit_offset, bool want_dweight) "
    "-> (Tensor, Tensor)",
    fake=_fake_backward,
)
def rms_norm_backward(
    x: Tensor, weight_H: Tensor, scale: Tensor, dy: Tensor, more: Tensor | None, unit_offset: bool, want_dweight: bool
) -> tuple[Tensor, Tensor]:
    dx = torch.empty(x.shape, dtype=x.dtype)
    columns, w_H = x.shape[-1], weight_H.to(torch.float32).contiguous()
    x_TH, dy_TH, w_H = x.reshape(-1, columns), dy.reshape(-1, columns), w_H + 1.0 if unit_offset else w_H
    x_TH, dy_TH = x_TH if x_TH.stride(1) == 1 else x_TH.contiguous(), dy_TH if dy_TH.stride(1) == 1 else dy_TH.contiguous()
    more_TH = None if more is None else more.reshape(-1, columns)
    if more_TH is not None and more_TH.stride(1) != 1:
        more_TH = more_TH.contiguous()
    rows = x_TH.shape[0]
    block = max(_ROWS, -(-rows // _PARTIAL_SUMS))
    partial_BH = torch.empty((-(-rows // block), columns), dtype=torch.float32) if want_dweight else None
    KERNELS(
        "backward", x.dtype, dy.dtype, x_TH, w_H, scale.contiguous(), dy_TH, more_TH, dx, partial_BH,
        rows, columns, x_TH.stride(0), dy_TH.stride(0), 0 if more_TH is None else more_TH.stride(0), block,
    )  # fmt: skip
    # summed in fp32, and narrowed once
    return dx, weight_H.new_empty(0) if partial_BH is None else partial_BH.sum(0).to(weight_H.dtype)
