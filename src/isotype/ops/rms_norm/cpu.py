"""RMSNorm by the C++ kernels: fp32, bf16 or fp16, each of x, weight and output its own. H hidden."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpp import CppKernels
from ..library import library_op

KERNELS = CppKernels(__file__, forward="ddppppppiiiif", backward="ddpppppppiiiiii")
# most partial sums of the weight's gradient, and the fewest rows that are worth a partial sum
_PARTIAL_SUMS, _ROWS = 64, 16


def _rows(x: Tensor) -> Tensor:
    """[T H] of values that do not lie in one piece, each row's adjacent."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def _fake_forward(
    x: Tensor, residual: Tensor | None, weight_H: Tensor, eps: float, unit_offset: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    scale = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    total = torch.empty(x.shape if residual is not None else (0,), dtype=x.dtype, device=x.device)
    return torch.empty(x.shape, dtype=out_dtype, device=x.device), scale, total


def forward_now(
    x: Tensor, residual: Tensor | None, weight_H: Tensor, eps: float, unit_offset: bool, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, 1 / rms of each row, x + residual, empty where there is none)"""
    shape = x.shape
    columns = shape[-1]
    y, scale = torch.empty(shape, dtype=out_dtype), torch.empty((*shape[:-1], 1), dtype=torch.float32)
    total = torch.empty(shape if residual is not None else (0,), dtype=x.dtype)
    w = weight_H.to(torch.float32).contiguous()
    w = w + 1.0 if unit_offset else w
    x_step = other_step = columns
    if not x.is_contiguous():
        x = _rows(x)
        x_step = x.stride(0)
    if residual is not None and not residual.is_contiguous():
        residual = _rows(residual)
        other_step = residual.stride(0)
    KERNELS(
        "forward", x.dtype, out_dtype, x, residual, w, y, scale, total, scale.numel(), columns, x_step, other_step,
        eps,
    )  # fmt: skip
    return y, scale, total


rms_norm_forward = library_op(
    "rms_norm_forward_cpp(Tensor x, Tensor? residual, Tensor weight, float eps, bool unit_offset, ScalarType out_dtype) "
    "-> (Tensor, Tensor, Tensor)",
    fake=_fake_forward,
)(forward_now)


def _fake_backward(
    x: Tensor, weight_H: Tensor, scale: Tensor, dy: Tensor, more: Tensor | None, unit_offset: bool, want_dweight: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), weight_H.new_empty(weight_H.shape if want_dweight else (0,))


def backward_now(
    x: Tensor, weight_H: Tensor, scale: Tensor, dy: Tensor, more: Tensor | None, unit_offset: bool, want_dweight: bool
) -> tuple[Tensor, Tensor]:
    dx, rows, columns = torch.empty(x.shape, dtype=x.dtype), scale.numel(), x.shape[-1]
    w = weight_H.to(torch.float32).contiguous()
    w = w + 1.0 if unit_offset else w
    x_step = dy_step = more_step = columns
    if not x.is_contiguous():
        x = _rows(x)
        x_step = x.stride(0)
    if not dy.is_contiguous():
        dy = _rows(dy)
        dy_step = dy.stride(0)
    if more is not None and not more.is_contiguous():
        more = _rows(more)
        more_step = more.stride(0)
    block = max(_ROWS, -(-rows // _PARTIAL_SUMS))
    partial_BH = torch.empty((-(-rows // block), columns), dtype=torch.float32) if want_dweight else None
    KERNELS(
        "backward", x.dtype, dy.dtype, x, w, scale.contiguous(), dy, more, dx, partial_BH, rows, columns, x_step,
        dy_step, more_step, block,
    )  # fmt: skip
    # summed in fp32, and narrowed once
    return dx, weight_H.new_empty(0) if partial_BH is None else partial_BH.sum(0).to(weight_H.dtype)


rms_norm_backward = library_op(
    "rms_norm_backward_cpp(Tensor x, Tensor weight, Tensor scale, Tensor dy, Tensor? more, bool unit_offset, bool want_dweight) "
    "-> (Tensor, Tensor)",
    fake=_fake_backward,
)(backward_now)
