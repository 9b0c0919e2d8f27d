"""Computes the activation between the two layers of an expert. The activation is a gated
activation, or any function that is applied to rows.

T is the number of rows, G the number of output features of the first layer, and I the number of
inner features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..backend import arithmetic_dtype, choose_implementation
from ..gated.op import KERNELS, gated_backward, gated_forward, gated_reference
from ..library import library_op
from .groups import KERNELS as EXPERT_KERNELS


class Clamped(NamedTuple):
    """The activation function of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate). gate contains
    the even columns, clamped to at most `limit`. up contains the odd columns, clamped to
    -limit..limit.
    """

    alpha: float
    limit: float


# an activation that the kernels have, or a function of PyTorch
Activation = Literal["silu", "gelu", "gelu_tanh"] | Clamped | Callable[[Tensor], Tensor]


def _split_halves(g: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = g.chunk(2, dim=-1)
    return gate, up


def activation_reference(g: Tensor, kind: Activation) -> Tensor:
    """Computes the activation [... G] -> [... I] in plain PyTorch. It also supports fp64 inputs."""
    if isinstance(kind, str):
        return gated_reference(*_split_halves(g), kind)
    if not isinstance(kind, Clamped):
        return kind(g)
    gate = g[..., ::2].to(arithmetic_dtype(g.dtype))
    up = g[..., 1::2].to(arithmetic_dtype(g.dtype))
    gate = gate.clamp(max=kind.limit)
    up = up.clamp(-kind.limit, kind.limit)
    return ((up + 1) * gate * torch.sigmoid(kind.alpha * gate)).to(g.dtype)


def apply_activation(g_TG: Tensor, kind: Activation) -> Tensor:
    """Returns the activation, with the shape [T I] and the dtype of the input. Autograd does not
    record it, because the caller computes the gradients itself.
    """
    arguments = _kernel_arguments(kind)
    if arguments is not None and (
        implementation := choose_implementation(EXPERT_KERNELS, g_TG)
    ) in (
        "cpp",
        "triton",
    ):
        if implementation == "cpp":
            return _cpp_activate(g_TG, *arguments)
        return _activate(g_TG, *arguments)
    if not isinstance(kind, str):
        return activation_reference(g_TG, kind)
    return gated_forward(choose_implementation(KERNELS, g_TG), *_split_halves(g_TG), kind)


def _kernel_arguments(kind: Activation) -> tuple[str, float, float] | None:
    """Returns the arguments (name, alpha, limit) of the kernels, or None if the activation is a
    function.
    """
    if isinstance(kind, Clamped):
        return "clamped", kind.alpha, kind.limit
    return (kind, 0.0, 0.0) if isinstance(kind, str) else None


def scale_rows(x_TN: Tensor, w_T: Tensor) -> Tensor:
    """Multiplies each row of x by its weight. The result is rounded once, to the dtype of x."""
    return (x_TN.to(w_T.dtype) * w_T[:, None]).to(x_TN.dtype)


def activation_backward(
    g_TG: Tensor, dh_TI: Tensor, w_T: Tensor, kind: Activation, *, needs_h: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns three tensors: the gradient of g, which is multiplied by w; h, or an empty tensor if h
    is not needed; and the inner product <h, dh> of each row.

    dh  the gradient of h, before it is multiplied by w
    w   the routing weight of each row, fp32
    """
    arguments = _kernel_arguments(kind)
    if (
        arguments is not None
        and w_T.dtype is torch.float32
        and (implementation := choose_implementation(EXPERT_KERNELS, g_TG)) in ("cpp", "triton")
    ):
        if implementation == "cpp":
            return _cpp_backward(g_TG, dh_TI, w_T, *arguments, needs_h)
        return _backward(g_TG, dh_TI, w_T, *arguments, needs_h)
    if isinstance(kind, str):
        gate, up = _split_halves(g_TG)
        dgate, dup, h = gated_backward(
            choose_implementation(KERNELS, g_TG), gate, up, scale_rows(dh_TI, w_T), kind, True
        )
        assert dup is not None
        assert h is not None
        dg = torch.cat((dgate, dup), -1)
    else:
        with torch.enable_grad():
            leaf = g_TG.detach().requires_grad_()
            activated = activation_reference(leaf, kind)
        (dg,) = torch.autograd.grad(activated, leaf, scale_rows(dh_TI, w_T))
        h = activated.detach()
    return dg, h, (h.to(w_T.dtype) * dh_TI.to(w_T.dtype)).sum(-1)


# --- the C++ and Triton kernels

# the numbers of the activations in cpu.cpp
_KIND_NUMBERS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "clamped": 3}


def _fake_activate(g: Tensor, *_: object) -> Tensor:
    return g.new_empty(g.shape[0], g.shape[1] // 2)


@library_op(
    "experts_activate_cpp(Tensor g, str kind, float alpha, float limit) -> Tensor",
    fake=_fake_activate,
)
def _cpp_activate(g_TG: Tensor, kind: str, alpha: float, limit: float) -> Tensor:
    h = _fake_activate(g_TG)
    EXPERT_KERNELS("activate", g_TG.dtype, g_TG, h, *h.shape, _KIND_NUMBERS[kind], alpha, limit)
    return h


def _fake_backward(
    g: Tensor, dh: Tensor, w: Tensor, kind: str, alpha: float, limit: float, want_h: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(g),
        torch.empty_like(dh) if want_h else dh.new_empty(0),
        torch.empty_like(w),
    )


@library_op(
    "experts_backward_cpp(Tensor g, Tensor dh, Tensor w, str kind, float alpha, float limit, bool"
    " want_h) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
)
def _cpp_backward(
    g_TG: Tensor, dh_TI: Tensor, w_T: Tensor, kind: str, alpha: float, limit: float, want_h: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns three tensors: the gradient of g, which is multiplied by w; h, or an empty tensor if h
    is not needed; and the inner product <h, dh> of each row.
    """
    outputs = dg, h, products = _fake_backward(g_TG, dh_TI, w_T, kind, alpha, limit, want_h)
    EXPERT_KERNELS(
        "backward",
        g_TG.dtype,
        g_TG,
        dh_TI,
        w_T,
        dg,
        h if want_h else None,
        products,
        *dh_TI.shape,
        _KIND_NUMBERS[kind],
        alpha,
        limit,
    )
    return outputs


@library_op(
    "experts_activate(Tensor g, str kind, float alpha, float limit) -> Tensor", fake=_fake_activate
)
def _activate(g_TG: Tensor, kind: str, alpha: float, limit: float) -> Tensor:
    from . import triton

    return triton.activate(g_TG, kind, alpha, limit)


@library_op(
    "experts_backward(Tensor g, Tensor dh, Tensor w, str kind, float alpha, float limit, bool"
    " want_h) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
)
def _backward(
    g_TG: Tensor, dh_TI: Tensor, w_T: Tensor, kind: str, alpha: float, limit: float, want_h: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from . import triton

    return triton.backward(g_TG, dh_TI, w_T, kind, alpha, limit, want_h)
