"""`gelu_mul`: the public op and its autograd function."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import UsageError
from ..autocast import autocast_off
from ..backend import cpp_runs, differentiated_again, reference_gradients, reference_runs, triton_runs
from ..debug import checked_in_debug
from ..pair import check_pair
from . import cpp, eager
from .contract import GELU_MUL
from .reference import gelu_mul_reference


class Paths(Protocol):
    """What each of the op's modules offers: `kernels`, `cpp` and `eager`."""

    def gelu_mul_forward(self, gate: Tensor, up: Tensor, *, tanh: bool) -> Tensor: ...
    def gelu_mul_backward(self, gate: Tensor, up: Tensor, dy: Tensor, *, tanh: bool) -> tuple[Tensor, Tensor]: ...
    def gelu_mul_gradients(self, gate: Tensor, up: Tensor, dy: Tensor, *, tanh: bool) -> tuple[Tensor, Tensor, Tensor]: ...


def paths(x: Tensor) -> Paths:
    """The module whose functions run on `x`."""
    if triton_runs(x):
        from . import kernels

        return kernels
    return cpp if cpp_runs(cpp.KERNELS, x) else eager


class GeluMul(torch.autograd.Function):
    """Saves only its inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, tanh: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.tanh = tanh
        with autocast_off(gate):
            return paths(gate).gelu_mul_forward(gate, up, tanh=tanh)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        if differentiated_again():
            reference = partial(gelu_mul_reference, approximate="tanh" if ctx.tanh else "none")
            return *reference_gradients(reference, (gate, up), dy), None
        with autocast_off(gate):
            return *paths(gate).gelu_mul_backward(gate, up, dy, tanh=ctx.tanh), None


@checked_in_debug(GELU_MUL)
def gelu_mul(gate: Tensor, up: Tensor, *, approximate: str = "none") -> Tensor:
    """gelu(gate) * up in one pass, exact (approximate="none") or "tanh"; saves only its inputs.

    gate    F[*n d]   any float dtype, unchanged by autocast
    up      F[*n d]
    ->      F[*n d]
    inside  fp32      (fp64 when F is fp64)
    grads   gate: F   up: F
    Raises  DtypeError DT001 when gate and up differ; ShapeError SH001; UsageError
    """
    check_pair(gate, up)
    if approximate not in ("none", "tanh"):
        raise UsageError(f"approximate is {approximate!r}: expected none or tanh")
    return gelu_mul_reference(gate, up, approximate=approximate) if reference_runs() else GeluMul.apply(gate, up, approximate == "tanh")
