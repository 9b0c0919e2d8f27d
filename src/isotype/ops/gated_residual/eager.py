"""residual + gate * x and its backward as formulas: widen once, compute, narrow once. B pictures, T tokens, H hidden."""

from __future__ import annotations

from torch import Tensor

from ..autocast import narrowed, wide


def gated_residual_forward(residual_BTH: Tensor, x_BTH: Tensor, gate_BH: Tensor) -> Tensor:
    dtype = wide(x_BTH.dtype, gate_BH.dtype)
    return narrowed(residual_BTH.to(dtype) + gate_BH.to(dtype)[:, None] * x_BTH.to(dtype), residual_BTH.dtype)


def gated_residual_backward(x_BTH: Tensor, gate_BH: Tensor, dy_BTH: Tensor, *, want_gate: bool) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and of the gate; the residual's is dy."""
    dtype = wide(x_BTH.dtype, gate_BH.dtype)
    dy = dy_BTH.to(dtype)
    dx_BTH = (dy * gate_BH.to(dtype)[:, None]).to(x_BTH.dtype)
    # summed in the wide dtype, and narrowed once
    return dx_BTH, (dy * x_BTH.to(dtype)).sum(1).to(gate_BH.dtype) if want_gate else None
