"""The ops `silu_mul`, `gelu_mul` and `gelu` compute an activation, alone or multiplied by `up`.
They share one implementation.

Autograd does not record calls of `gated_product` and `gated_gradients`. They are called inside
larger autograd functions, which handle autograd and autocast themselves.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import DtypeError, ShapeError, UsageError
from ..backend import (
    Implementation,
    apply_function,
    arithmetic_dtype,
    can_bypass_dispatcher,
    cast_output,
    choose_implementation,
    refuse_second_derivative,
    uses_fused_kernel,
)
from ..contract import OpContract
from ..cpp import CppKernels, view_as_rows
from ..library import library_op
from ..recomputable import mark_recomputable

# F is a free float dtype
SILU_MUL = OpContract(
    "gate: F[*n d], up: F[*n d] -> F[*n d]",
    inside="fp32",
    grads={"gate": "F", "up": "F"},
    autocast="ignored",
)
GELU_MUL = OpContract(
    "gate: F[*n d], up: F[*n d] -> F[*n d]",
    inside="fp32",
    grads={"gate": "F", "up": "F"},
    autocast="ignored",
)
GELU = OpContract("x: F[*n d] -> F[*n d]", inside="fp32", grads={"x": "F"}, autocast="ignored")

Activation = Literal["silu", "gelu", "gelu_tanh"]
Gated = Literal["silu_mul", "gelu_mul exact", "gelu_mul tanh"]  # the op and, for GELU, its form
# op -> the activation that it computes
_ACTIVATIONS: dict[Gated, Activation] = {
    "silu_mul": "silu",
    "gelu_mul exact": "gelu",
    "gelu_mul tanh": "gelu_tanh",
}

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_CUBIC_FACTOR = 0.044715  # the constant of GELU's approximation with tanh


# --- reference


def gated_reference(x: Tensor, up: Tensor | None, activation: Activation) -> Tensor:
    """Computes the activation, alone or multiplied by `up`, in plain PyTorch. It also supports fp64
    inputs.
    """
    g = x.to(arithmetic_dtype(x.dtype))
    if activation == "silu":
        y = g * torch.sigmoid(g)
    else:
        y = F.gelu(g, approximate="tanh" if activation == "gelu_tanh" else "none")
    return cast_output(y if up is None else y * up.to(g.dtype), x.dtype)


def silu_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    return gated_reference(gate, up, "silu")


def gelu_mul_reference(gate: Tensor, up: Tensor, *, approximate: str = "none") -> Tensor:
    return gated_reference(gate, up, _gelu_activation(approximate))


def gelu_reference(x: Tensor, *, approximate: str = "none") -> Tensor:
    return gated_reference(x, None, _gelu_activation(approximate))


# --- the C++ kernels of cpu.cpp

# a letter per argument of the functions in cpu.cpp (`CppKernels`)
KERNELS = CppKernels(__file__, forward="dpppiiiii", backward="dppppppiiiiii")
# the numbers of the activations in cpu.cpp
_ACTIVATION_NUMBERS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


def activation_number(kind: Gated) -> int:
    """Returns the number in cpu.cpp of the activation of an op."""
    return _ACTIVATION_NUMBERS[_ACTIVATIONS[kind]]


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _run_cpp_forward(x: Tensor, up: Tensor | None, activation: str) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype)
    if up is None:
        (x,) = view_as_rows(x)
    else:
        x, up = view_as_rows(x, up)
    KERNELS(
        "forward",
        y.dtype,
        x,
        up,
        y,
        *x.shape,
        x.stride(0),
        0 if up is None else up.stride(0),
        _ACTIVATION_NUMBERS[activation],
    )
    return y


_cpp_forward = library_op(
    "gated_forward_cpp(Tensor x, Tensor? up, str activation) -> Tensor",
    fake=lambda x, up, activation: _empty_like(x),
)(_run_cpp_forward)


def _fake_backward(
    x: Tensor, up: Tensor | None, dy: Tensor, activation: str, returns_product: bool
) -> tuple[Tensor, Tensor, Tensor]:
    empty = (0,)
    return (
        _empty_like(x),
        x.new_empty(empty if up is None else up.shape),
        x.new_empty(x.shape if returns_product else empty),
    )


@library_op(
    "gated_backward_cpp(Tensor x, Tensor? up, Tensor dy, str activation, bool returns_product) -> (Tensor,"
    " Tensor, Tensor)",
    fake=_fake_backward,
)
def _cpp_backward(
    x: Tensor, up: Tensor | None, dy: Tensor, activation: str, returns_product: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradient of `x`, the gradient of `up`, and the output of the forward. If one of
    these tensors is not needed, an empty tensor is returned in its place.
    """
    dx, dup, y = _fake_backward(x, up, dy, activation, returns_product)
    if up is None:
        x, dy = view_as_rows(x, dy)
    else:
        x, up, dy = view_as_rows(x, up, dy)
    KERNELS(
        "backward",
        dx.dtype,
        x,
        up,
        dy,
        dx,
        None if up is None else dup,
        y if returns_product else None,
        *x.shape,
        x.stride(0),
        0 if up is None else up.stride(0),
        dy.stride(0),
        _ACTIVATION_NUMBERS[activation],
    )
    return dx, dup, y


# --- the op


def gated_forward(
    implementation: Implementation, x: Tensor, up: Tensor | None, activation: Activation
) -> Tensor:
    if implementation == "cpp":
        if can_bypass_dispatcher(x, up):
            return _run_cpp_forward(x, up, activation)
        return _cpp_forward(x, up, activation)
    if implementation == "triton":
        from . import triton

        return triton.gated_forward(x, up, activation)
    return gated_reference(x, up, activation)


def gated_backward(
    implementation: Implementation,
    x: Tensor,
    up: Tensor | None,
    dy: Tensor,
    activation: Activation,
    returns_product: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of x and up. With `returns_product` it also returns the result of the
    forward. The gradients and the result of the forward use the same exp, so it is computed only
    once.
    """
    if implementation == "cpp":
        dx, dup, recomputed = _cpp_backward(x, up, dy, activation, returns_product)
        return dx, None if up is None else dup, recomputed if returns_product else None
    if implementation == "triton":
        from . import triton

        return triton.gated_backward(x, up, dy, activation, returns_product)
    g = x.to(arithmetic_dtype(x.dtype))
    d = dy.to(g.dtype)
    value, slope = _value_and_slope(g, activation)
    y = gated_reference(x, up, activation) if returns_product else None
    if up is None:
        return (d * slope).to(x.dtype), None, y
    return (d * up.to(g.dtype) * slope).to(x.dtype), (d * value).to(up.dtype), y


def _value_and_slope(g: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Returns the activation and its derivative. Both need the same exp, erf or tanh, which is
    computed only once because it takes most of the time on a CPU.
    """
    if activation == "silu":
        s = torch.sigmoid(g)
        return g * s, s * (1 + g * (1 - s))
    if activation == "gelu_tanh":
        t = torch.tanh(_SQRT_2_OVER_PI * (g + _CUBIC_FACTOR * g * g * g))
        half = 0.5 * (1 + t)
        return g * half, half + 0.5 * g * (1 - t * t) * _SQRT_2_OVER_PI * (
            1 + 3 * _CUBIC_FACTOR * g * g
        )
    half = 0.5 * (1 + torch.erf(g * math.sqrt(0.5)))
    return g * half, half + g * torch.exp(-0.5 * g * g) * (1 / math.sqrt(2 * math.pi))


class GatedProduct(torch.autograd.Function):
    """The autograd function of the ops `silu_mul`, `gelu_mul` and `gelu`. It saves only its inputs.
    Autocast does not change the dtypes of these formulas, since they have no matrix product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor | None,
        activation: Activation,
        implementation: Implementation,
    ) -> Tensor:
        ctx.save_for_backward(x, up)
        ctx.implementation = implementation
        ctx.activation = activation
        return gated_forward(implementation, x, up, activation)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(ctx.activation)
        x, up = ctx.saved_tensors
        dx, dup, _ = gated_backward(ctx.implementation, x, up, dy, ctx.activation, False)
        return dx, dup, None, None


def _check_gate_and_up(gate: Tensor, up: Tensor) -> None:
    if gate.dtype != up.dtype or not gate.is_floating_point():
        raise DtypeError(
            f"gate is {gate.dtype} and up is {up.dtype}, declared one float dtype",
            code="DT001",
            fix="up.to(gate.dtype)",
        )
    if gate.shape != up.shape:
        raise ShapeError(
            f"gate is {list(gate.shape)} and up is {list(up.shape)}, declared one shape",
            code="SH001",
        )


def _gelu_activation(approximate: str) -> Activation:
    if approximate not in ("none", "tanh"):
        raise UsageError(f"approximate is {approximate!r}: expected none or tanh")
    return "gelu_tanh" if approximate == "tanh" else "gelu"


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Computes silu(gate) * up in one pass. Only the inputs are saved for backward.

    gate    F[*n d]   any float dtype, unchanged by autocast
    up      F[*n d]
    ->      F[*n d]
    inside  fp32      (fp64 when F is fp64)
    grads   gate: F   up: F
    Raises  DtypeError DT001 when gate and up differ; ShapeError SH001
    """
    _check_gate_and_up(gate, up)
    y: Tensor = apply_function(GatedProduct, gate, up, "silu", choose_implementation(KERNELS, gate))
    return y


def gelu_mul(gate: Tensor, up: Tensor, *, approximate: str = "none") -> Tensor:
    """Computes gelu(gate) * up in one pass, with the exact GELU (approximate="none") or the tanh
    approximation ("tanh"). Only the inputs are saved for backward.

    gate    F[*n d]   any float dtype, unchanged by autocast
    up      F[*n d]
    ->      F[*n d]
    inside  fp32      (fp64 when F is fp64)
    grads   gate: F   up: F
    Raises  DtypeError DT001 when gate and up differ; ShapeError SH001; UsageError
    """
    _check_gate_and_up(gate, up)
    y: Tensor = apply_function(
        GatedProduct, gate, up, _gelu_activation(approximate), choose_implementation(KERNELS, gate)
    )
    return y


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """Computes gelu(x) in one pass, exactly (approximate="none") or by the tanh approximation
    ("tanh"). Only x is saved for backward; a LoRA layer that reads the result recomputes it from x.

    x       F[*n d]   any float dtype, unchanged by autocast
    ->      F[*n d]
    inside  fp32      (fp64 when F is fp64)
    grads   x: F
    Raises  UsageError
    """
    y: Tensor = apply_function(
        GatedProduct, x, None, _gelu_activation(approximate), choose_implementation(KERNELS, x)
    )
    return mark_recomputable(y, partial(gelu, approximate=approximate), x)


# --- functions for callers that save only gate and up


def gated_product(kind: Gated, gate: Tensor, up: Tensor) -> Tensor:
    """Computes activation(gate) * up and rounds the result once.

    gate, up  F[T I]
    ->        F[T I]
    """
    return gated_forward(choose_implementation(KERNELS, gate), gate, up, _ACTIVATIONS[kind])


def gated_gradients(
    kind: Gated, gate: Tensor, up: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (gradient of gate, gradient of up, activation(gate) * up). The kernels compute all
    three tensors in one pass.

    gate, up, dy  F[T I]
    """
    dgate, dup, y = gated_backward(
        choose_implementation(KERNELS, gate), gate, up, dy, _ACTIVATIONS[kind], True
    )
    assert dup is not None
    assert y is not None
    return dgate, dup, y


def gated_gradients_(
    kind: Gated, gate: Tensor, up: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the same as `gated_gradients`, for a caller that no longer needs gate, up and dy. On
    a GPU the three results overwrite gate, up and dy, in this order.
    """
    if uses_fused_kernel("gated", gate) and all(
        t.is_contiguous() and t.dtype == gate.dtype for t in (gate, up, dy)
    ):
        _gradients_in_place(gate, up, dy, _ACTIVATIONS[kind])
        return gate, up, dy
    return gated_gradients(kind, gate, up, dy)


@library_op(
    "gated_gradients_(Tensor(a!) gate, Tensor(b!) up, Tensor(c!) dy, str activation) -> ()",
    fake=lambda *_: None,
)
def _gradients_in_place(gate: Tensor, up: Tensor, dy: Tensor, activation: Activation) -> None:
    from . import triton

    triton.gated_backward(gate, up, dy, activation, True, in_place=True)
