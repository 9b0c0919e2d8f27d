"""`gated_residual`: the public op and its autograd function. B pictures, T tokens, H hidden."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import DtypeError, ShapeError
from ..autocast import autocast_off
from ..backend import cpp_runs, differentiated_again, reference_gradients, reference_runs, triton_runs
from ..by_picture import check_vectors
from ..debug import checked_in_debug
from . import cpp, eager
from .contract import GATED_RESIDUAL
from .reference import gated_residual_reference


class Paths(Protocol):
    """What each of the op's modules offers: `kernels`, `cpp` and `eager`."""

    def gated_residual_forward(self, residual_BTH: Tensor, x_BTH: Tensor, gate_BH: Tensor) -> Tensor: ...
    def gated_residual_backward(
        self, x_BTH: Tensor, gate_BH: Tensor, dy_BTH: Tensor, *, want_gate: bool
    ) -> tuple[Tensor, Tensor | None]: ...


def _paths(x: Tensor, gate: Tensor) -> Paths:
    if triton_runs(x) and gate.dtype != torch.float64:
        from . import kernels

        return kernels if kernels.fits(x) else eager
    return cpp if cpp_runs(cpp.KERNELS, x, gate) else eager


class GatedResidual(torch.autograd.Function):
    """Saves x and the gate; the residual's gradient is the incoming one."""

    @staticmethod
    def forward(ctx: Any, residual_BTH: Tensor, x_BTH: Tensor, gate_BH: Tensor) -> Tensor:
        ctx.save_for_backward(x_BTH, gate_BH)
        with autocast_off(x_BTH):
            return _paths(x_BTH, gate_BH).gated_residual_forward(residual_BTH, x_BTH, gate_BH)

    @staticmethod
    def backward(ctx: Any, dy_BTH: Tensor) -> tuple[Tensor | None, ...]:
        x_BTH, gate_BH = ctx.saved_tensors
        needs_residual, _, needs_gate = ctx.needs_input_grad
        if differentiated_again():
            return dy_BTH if needs_residual else None, *reference_gradients(_added, (x_BTH, gate_BH), dy_BTH)
        with autocast_off(x_BTH):
            dx_BTH, dgate_BH = _paths(x_BTH, gate_BH).gated_residual_backward(x_BTH, gate_BH, dy_BTH, want_gate=needs_gate)
        return dy_BTH if needs_residual else None, dx_BTH, dgate_BH


def _added(x_BTH: Tensor, gate_BH: Tensor) -> Tensor:
    """What is added to the residual."""
    return gated_residual_reference(torch.zeros_like(x_BTH), x_BTH, gate_BH)


@checked_in_debug(GATED_RESIDUAL)
def gated_residual(residual: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """residual + gate * x in one pass, rounded once; saves x and the gate.

    residual  F[B T H]   any float dtype, unchanged by autocast
    x         F[B T H]
    gate      M[B H]     of each picture, any float dtype: an fp32 gate does not widen the stream
    ->        F[B T H]
    inside    fp32       (fp64 when either is fp64)
    grads     residual: F   x: F   gate: M   summed over tokens in fp32
    Raises    DtypeError DT001 when residual and x differ; ShapeError SH001
    """
    check_vectors(x, gate=gate)
    if residual.dtype != x.dtype:
        raise DtypeError(
            f"residual is {residual.dtype} and x is {x.dtype}, declared one float dtype", code="DT001", fix="x.to(residual.dtype)"
        )
    if residual.shape != x.shape:
        raise ShapeError(f"residual is {list(residual.shape)} and x is {list(x.shape)}, declared one shape", code="SH001")
    return gated_residual_reference(residual, x, gate) if reference_runs() else GatedResidual.apply(residual, x, gate)
