"""`silu_mul`: the public op and its autograd function."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ..autocast import autocast_off
from ..backend import cpp_runs, differentiated_again, reference_gradients, reference_runs, triton_runs
from ..debug import checked_in_debug
from ..pair import check_pair
from . import cpp, eager
from .contract import SILU_MUL
from .reference import silu_mul_reference


class Paths(Protocol):
    """What each of the op's modules offers: `kernels`, `cpp` and `eager`."""

    def silu_mul_forward(self, gate: Tensor, up: Tensor) -> Tensor: ...
    def silu_mul_backward(self, gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]: ...
    def silu_mul_gradients(self, gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...


def paths(x: Tensor) -> Paths:
    """The module whose functions run on `x`."""
    if triton_runs(x):
        from . import kernels

        return kernels
    return cpp if cpp_runs(cpp.KERNELS, x) else eager


class SiluMul(torch.autograd.Function):
    """Saves only its inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        with autocast_off(gate):
            return paths(gate).silu_mul_forward(gate, up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        if differentiated_again():
            return tuple(reference_gradients(silu_mul_reference, (gate, up), dy))
        with autocast_off(gate):
            return paths(gate).silu_mul_backward(gate, up, dy)


@checked_in_debug(SILU_MUL)
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in one pass; saves only its inputs.

    gate    F[*n d]   any float dtype, unchanged by autocast
    up      F[*n d]
    ->      F[*n d]
    inside  fp32      (fp64 when F is fp64)
    grads   gate: F   up: F
    Raises  DtypeError DT001 when gate and up differ; ShapeError SH001
    """
    check_pair(gate, up)
    return silu_mul_reference(gate, up) if reference_runs() else SiluMul.apply(gate, up)
