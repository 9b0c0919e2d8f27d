"""Computes parts of a decoder layer for the few rows of a generated token. Each part is one call of
a C++ function.

In small models, the calls of a token take more time than its products. One call therefore computes a
norm and the projections of attention that read it, and another one the whole second half of the
layer: the sum, the norm, the gated MLP and the second sum. The results have the same bits as those
of the single ops, because the C++ functions call the functions of these ops. With 30 layers of 64
features, a token takes about half as long as with a call for each op.

This is used within a call of `generate`, as in `few_rows`. As there, each call checks that the
modules, their hooks, their tensors and the addresses of these are the same as when they were read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.backend import PLAIN_TENSOR_TYPES
from ..ops.gated import Gated
from ..ops.gated.op import KERNELS as GATED_KERNELS
from ..ops.gated.op import activation_number
from ..ops.rms_norm.op import KERNELS as NORM_KERNELS
from ..ops.rms_norm.op import kernel_weight
from .attach import GLOBAL_FORWARD_HOOKS, GLOBAL_FORWARD_PRE_HOOKS, store_outputs
from .few_rows import RowLayers
from .mlp import MlpRowLayers
from .products import KERNELS


def are_norm_kernels_usable(weight: Any) -> bool:
    """Whether the C++ functions compute a norm with this weight."""
    return (
        type(weight) in PLAIN_TENSOR_TYPES
        and weight.is_cpu
        and weight.dtype in (torch.float32, torch.bfloat16)
        and NORM_KERNELS.load()
        and GATED_KERNELS.load()
    )


class ReadNorm:
    """What was read of an RMSNorm whose forward is an op of Isotype.

    eps_attribute  the name of the attribute that contains epsilon; None if epsilon is a constant
    hooks          its forward hooks; the caller has checked that they change no result
    weight_fp32    the weight as the C++ function reads it
    """

    __slots__ = (
        "address",
        "eps",
        "eps_attribute",
        "hooks",
        "method",
        "norm",
        "weight",
        "weight_fp32",
    )

    def __init__(
        self, norm: Any, *, eps: float, eps_attribute: str | None, unit_offset: bool
    ) -> None:
        self.norm = norm
        self.method = norm.__dict__["forward"]
        self.hooks = dict(norm._forward_hooks)
        self.eps = eps
        self.eps_attribute = eps_attribute
        self.weight = norm._parameters["weight"]
        self.address = self.weight.data_ptr()
        self.weight_fp32 = kernel_weight(self.weight.detach(), unit_offset=unit_offset)

    def is_current(self) -> bool:
        norm = self.norm
        attributes = norm.__dict__
        return (
            attributes.get("forward") is self.method
            and norm._parameters["weight"] is self.weight
            and self.weight.data_ptr() == self.address
            and norm._forward_hooks == self.hooks
            and not norm._forward_pre_hooks
            and not norm._backward_hooks
            and not norm._backward_pre_hooks
            and (self.eps_attribute is None or attributes[self.eps_attribute] == self.eps)
        )


# --- the norm before attention, and the projections that read it


def project_normed_rows(
    x: Tensor, weight_fp32: Tensor, eps: float, rows: RowLayers
) -> tuple[Tensor, list[Tensor]]:
    """Returns (the norm of x, the outputs of the layers for it).

    x   F[*n H]
    ->  F[*n H], F[*n O] of each layer
    """
    x = x.contiguous()
    normed = torch.empty_like(x)
    outputs, pointers = rows.allocate(x)
    KERNELS.calls["project_normed_rows"](
        rows.dtype is torch.float32,
        NORM_KERNELS.address("forward"),
        weight_fp32.data_ptr(),
        x.data_ptr(),
        None,
        None,
        normed.data_ptr(),
        rows.addresses,
        rows.scales,
        len(outputs),
        *pointers,
        x.numel() // rows.features,
        rows.features,
        eps,
        torch.get_num_threads(),
    )
    return normed, outputs


class NormedRows:
    """A norm and the LoRA layers that have its output as their input."""

    __slots__ = ("layers", "norm", "rows")

    def __init__(self, norm: ReadNorm, layers: tuple[Any, ...], rows: RowLayers) -> None:
        self.norm = norm
        self.layers = layers
        self.rows = rows

    def is_usable(self, x: Tensor) -> bool:
        return not GLOBAL_FORWARD_HOOKS and not GLOBAL_FORWARD_PRE_HOOKS and self.rows.is_usable(x)

    def is_current(self) -> bool:
        return self.norm.is_current() and self.rows.is_current()

    def compute(self, x: Tensor) -> Tensor:
        """Returns the norm of x. The outputs of the layers are stored until the layers are called
        with this tensor.
        """
        norm = self.norm
        normed, outputs = project_normed_rows(x, norm.weight_fp32, norm.eps, self.rows)
        store_outputs(self.layers, normed, outputs)
        return normed


# --- the second half of a layer


def mlp_half_arguments(
    weight_fp32: Tensor, gated_op: Gated, inner: RowLayers, down: RowLayers
) -> tuple[Any, ...]:
    """Returns the arguments of the C++ function that are the same for each token."""
    return (
        NORM_KERNELS.address("forward"),
        weight_fp32.data_ptr(),
        GATED_KERNELS.address("forward"),
        activation_number(gated_op),
        inner.addresses,
        inner.scales,
        len(inner.columns),
        down.addresses,
        down.scales,
    )


def compute_mlp_half(x: Tensor, residual: Tensor, eps: float, arguments: tuple[Any, ...]) -> Tensor:
    """Computes t + down(activation(gate(n)) * up(n)) with t = x + residual and n = norm(t).

    x, residual  F[*n H]
    arguments    the result of `mlp_half_arguments`
    ->           F[*n H]
    """
    x = x.contiguous()
    residual = residual.contiguous()
    y = torch.empty_like(x)
    KERNELS.calls["decode_mlp_half"](
        x.dtype is torch.float32,
        x.data_ptr(),
        residual.data_ptr(),
        y.data_ptr(),
        *arguments,
        x.numel() // x.shape[-1],
        eps,
        torch.get_num_threads(),
    )
    return y


class MlpHalf:
    """The norm and the gated MLP of a decoder layer.

    activation_name, activation  the name of the MLP's activation, and the function that it was
    """

    __slots__ = ("activation", "activation_name", "arguments", "layers", "method", "mlp", "norm")

    def __init__(
        self,
        norm: ReadNorm,
        mlp: Any,
        layers: MlpRowLayers,
        *,
        gated_op: Gated,
        activation_name: str,
        activation: Any,
    ) -> None:
        self.norm = norm
        self.mlp = mlp
        self.method = mlp.__dict__["forward"]
        self.layers = layers
        self.activation_name = activation_name
        self.activation = activation
        self.arguments = mlp_half_arguments(norm.weight_fp32, gated_op, layers.inner, layers.down)

    def is_usable(self, x: Tensor) -> bool:
        mlp = self.mlp
        name = self.activation_name
        activation = mlp._modules.get(name) or mlp.__dict__.get(name)
        has_hooks = (
            mlp._forward_hooks
            or mlp._forward_pre_hooks
            or mlp._backward_hooks
            or mlp._backward_pre_hooks
            or getattr(activation, "_forward_hooks", None)
        )
        return not has_hooks and activation is self.activation and self.layers.is_usable(x)

    def is_current(self) -> bool:
        return (
            self.norm.is_current()
            and self.mlp.__dict__.get("forward") is self.method
            and self.layers.is_current()
        )

    def compute(self, x: Tensor, residual: Tensor) -> Tensor:
        return compute_mlp_half(x, residual, self.norm.eps, self.arguments)
