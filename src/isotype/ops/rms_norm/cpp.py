"""RMSNorm by the C++ kernels: fp32, bf16 or fp16, each of x, weight and output its own. T rows, H hidden."""

from __future__ import annotations

import torch
from torch import Tensor

from ..compiled import CppKernels
from ..library import library_op

KERNELS = CppKernels(__file__, forward="ddppppppiiiif", backward="ddpppppppiiiiii")
# most partial sums of the weight's gradient, and the fewest rows that are worth a partial sum
_PARTIAL_SUMS, _ROWS = 64, 16


def _rows(x_TH: Tensor) -> Tensor:
    return x_TH if x_TH.stride(-1) == 1 else x_TH.contiguous()


def _fp32(weight_H: Tensor, unit_offset: bool) -> Tensor:
    w = weight_H if weight_H.dtype is torch.float32 and weight_H.is_contiguous() else weight_H.to(torch.float32).contiguous()
    return w + 1.0 if unit_offset else w


def _fake_forward(
    x_TH: Tensor, residual_TH: Tensor | None, weight_H: Tensor, eps: float, unit_offset: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    scale_T1 = torch.empty((x_TH.shape[0], 1), dtype=torch.float32, device=x_TH.device)
    total_TH = torch.empty(x_TH.shape if residual_TH is not None else (0,), dtype=x_TH.dtype, device=x_TH.device)
    return torch.empty(x_TH.shape, dtype=out_dtype, device=x_TH.device), scale_T1, total_TH


@library_op(
    "rms_norm_forward_cpp(Tensor x, Tensor? residual, Tensor weight, float eps, bool unit_offset, ScalarType out_dtype) "
    "-> (Tensor, Tensor, Tensor)",
    fake=_fake_forward,
)
def _forward(
    x_TH: Tensor, residual_TH: Tensor | None, weight_H: Tensor, eps: float, unit_offset: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    x_TH = _rows(x_TH)
    other_TH = None if residual_TH is None else _rows(residual_TH)
    y_TH, scale_T1, total_TH = _fake_forward(x_TH, other_TH, weight_H, eps, unit_offset, out_dtype)
    other_stride = 0 if other_TH is None else other_TH.stride(0)
    KERNELS(
        "forward", x_TH.dtype, out_dtype, x_TH, other_TH, _fp32(weight_H, unit_offset), y_TH, scale_T1, total_TH,
        *x_TH.shape, x_TH.stride(0), other_stride, eps,
    )  # fmt: skip
    return y_TH, scale_T1, total_TH


def _fake_backward(
    x_TH: Tensor, weight_H: Tensor, scale_T1: Tensor, dy_TH: Tensor, more_TH: Tensor | None, unit_offset: bool, want_dweight: bool
) -> tuple[Tensor, Tensor]:
    dx_TH = torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device)
    return dx_TH, weight_H.new_empty(weight_H.shape if want_dweight else (0,))


@library_op(
    "rms_norm_backward_cpp(Tensor x, Tensor weight, Tensor scale, Tensor dy, Tensor? more, bool unit_offset, bool want_dweight) "
    "-> (Tensor, Tensor)",
    fake=_fake_backward,
)
def _backward(
    x_TH: Tensor, weight_H: Tensor, scale_T1: Tensor, dy_TH: Tensor, more_TH: Tensor | None, unit_offset: bool, want_dweight: bool
) -> tuple[Tensor, Tensor]:
    x_TH, dy_TH = _rows(x_TH), _rows(dy_TH)
    more_TH = None if more_TH is None else _rows(more_TH)
    rows, columns = x_TH.shape
    dx_TH = torch.empty((rows, columns), dtype=x_TH.dtype)
    block = max(_ROWS, -(-rows // _PARTIAL_SUMS))
    partial_BH = torch.empty((-(-rows // block), columns), dtype=torch.float32) if want_dweight else None
    more_stride = 0 if more_TH is None else more_TH.stride(0)
    KERNELS(
        "backward", x_TH.dtype, dy_TH.dtype, x_TH, _fp32(weight_H, unit_offset), scale_T1.contiguous(), dy_TH, more_TH, dx_TH, partial_BH,
        rows, columns, x_TH.stride(0), dy_TH.stride(0), more_stride, block,
    )  # fmt: skip
    # summed in fp32, and narrowed once
    return dx_TH, weight_H.new_empty(0) if partial_BH is None else partial_BH.sum(0).to(weight_H.dtype)


def rms_norm_forward(
    x_TH: Tensor, weight_H: Tensor, residual_TH: Tensor | None = None, *, eps: float, unit_offset: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, 1 / rms, x + residual or x itself), the second fp32[T 1]."""
    y_TH, scale_T1, total_TH = _forward(x_TH, residual_TH, weight_H, eps, unit_offset, out_dtype)
    return y_TH, scale_T1, x_TH if residual_TH is None else total_TH


def rms_norm_backward(
    x_TH: Tensor,
    weight_H: Tensor,
    scale_T1: Tensor,
    dy_TH: Tensor,
    more_TH: Tensor | None = None,
    *,
    unit_offset: bool,
    want_dweight: bool,
) -> tuple[Tensor, Tensor | None]:
    dx_TH, dweight_H = _backward(x_TH, weight_H, scale_T1, dy_TH, more_TH, unit_offset, want_dweight)
    return dx_TH, dweight_H if want_dweight else None
