"""`gelu`: the public op and its autograd function."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import UsageError
from ..autocast import autocast_off
from ..backend import cpp_runs, differentiated_again, reference_gradients, reference_runs, triton_runs
from ..debug import checked_in_debug
from ..remade import remember
from . import cpp, eager
from .contract import GELU
from .reference import gelu_reference


class Paths(Protocol):
    """What each of the op's modules offers: `kernels`, `cpp` and `eager`."""

    def gelu_forward(self, x: Tensor, *, tanh: bool) -> Tensor: ...
    def gelu_backward(self, x: Tensor, dy: Tensor, *, tanh: bool) -> Tensor: ...


def paths(x: Tensor) -> Paths:
    """The module whose functions run on `x`."""
    if triton_runs(x):
        from . import kernels

        return kernels
    return cpp if cpp_runs(cpp.KERNELS, x) else eager


class Gelu(torch.autograd.Function):
    """Saves only its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tanh: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.tanh = tanh
        with autocast_off(x):
            return paths(x).gelu_forward(x, tanh=tanh)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None]:
        (x,) = ctx.saved_tensors
        if differentiated_again():
            return reference_gradients(partial(gelu_reference, approximate="tanh" if ctx.tanh else "none"), (x,), dy)[0], None
        with autocast_off(x):
            return paths(x).gelu_backward(x, dy, tanh=ctx.tanh), None


@checked_in_debug(GELU)
def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """gelu(x) in one pass, exact (approximate="none") or "tanh"; saves only its input, from which a LoRA layer makes it again.

    x       F[*n d]   any float dtype, unchanged by autocast
    ->      F[*n d]
    inside  fp32      (fp64 when F is fp64)
    grads   x: F
    Raises  UsageError
    """
    if approximate not in ("none", "tanh"):
        raise UsageError(f"approximate is {approximate!r}: expected none or tanh")
    if reference_runs():
        return gelu_reference(x, approximate=approximate)
    return remember(Gelu.apply(x, approximate == "tanh"), partial(gelu, approximate=approximate), x)
