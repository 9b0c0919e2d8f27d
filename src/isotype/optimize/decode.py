"""Computes parts of a decoder layer for the few rows of a generated token. Each part is one call of
a C++ function.

In small models, the calls of a token take more time than its products. One call therefore computes a
norm and the projections of attention that read it, and another one the whole second half of the
layer: the sum, the norm, the gated MLP and the second sum. The results have the same bits as those
of the single ops, because the C++ functions call the functions of these ops.

This is used within a call of `generate`, as in `lora.few_rows`. As there, each call checks that the
modules, their hooks and their tensors are the same as when they were read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..lora.attach import (
    GLOBAL_FORWARD_HOOKS,
    GLOBAL_FORWARD_PRE_HOOKS,
    store_outputs,
)
from ..lora.few_rows import RowLayers
from ..lora.mlp import MlpRowLayers
from ..lora.products import KERNELS
from ..ops.backend import PLAIN_TENSOR_TYPES
from ..ops.gated.op import KERNELS as GATED_KERNELS
from ..ops.gated.op import activation_number
from ..ops.rms_norm.op import KERNELS as NORM_KERNELS
from ..ops.rms_norm.op import kernel_weight
from ..precision.apply import is_cast_hook

if TYPE_CHECKING:
    from .forwards import GatedSettings, NormSettings


class ReadNorm:
    """What was read of a norm.

    hooks        its forward hooks, which would not change a result of the dtype of x
    weight_fp32  the weight as the C++ function reads it
    """

    __slots__ = ("eps", "eps_attribute", "hooks", "method", "norm", "weight", "weight_fp32")

    def __init__(self, norm: Any, settings: NormSettings, eps: float) -> None:
        self.norm = norm
        self.method = norm.__dict__["forward"]
        self.hooks = dict(norm._forward_hooks)
        self.eps = eps
        self.eps_attribute = settings.eps_attribute
        self.weight = norm._parameters["weight"]
        self.weight_fp32 = kernel_weight(self.weight.detach(), unit_offset=settings.unit_offset)

    @staticmethod
    def read(norm: Any, settings: NormSettings, eps: float, dtype: torch.dtype) -> ReadNorm | None:
        """Returns None if the C++ function does not compute this norm of an x of this dtype."""
        weight = norm._parameters.get("weight")
        if (
            settings.out_dtype not in (None, dtype)
            or type(weight) not in PLAIN_TENSOR_TYPES
            or not weight.is_cpu
            or weight.dtype not in (torch.float32, torch.bfloat16)
            or not NORM_KERNELS.load()
            or not all(
                is_cast_hook(hook) and hook.cast_dtype is dtype
                for hook in norm._forward_hooks.values()
            )
        ):
            return None
        return ReadNorm(norm, settings, eps)

    def is_current(self) -> bool:
        norm = self.norm
        attributes = norm.__dict__
        return (
            attributes.get("forward") is self.method
            and norm._parameters["weight"] is self.weight
            and norm._forward_hooks == self.hooks
            and not norm._forward_pre_hooks
            and not norm._backward_hooks
            and not norm._backward_pre_hooks
            and (self.eps_attribute is None or attributes[self.eps_attribute] == self.eps)
        )

    def arguments(self) -> tuple[int, int]:
        """Returns the addresses of the norm's function and of its weight."""
        return NORM_KERNELS.address("forward"), self.weight_fp32.data_ptr()


# --- the norm before attention, and the projections that read it


class NormedRows:
    """A norm and the LoRA layers that have its output as their input."""

    __slots__ = ("layers", "norm", "norm_arguments", "rows")

    def __init__(self, norm: ReadNorm, layers: tuple[Any, ...], rows: RowLayers) -> None:
        self.norm = norm
        self.norm_arguments = norm.arguments()
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
        rows = self.rows
        x = x.contiguous()
        normed = torch.empty_like(x)
        outputs, pointers = rows.allocate(x)
        KERNELS.calls["project_normed_rows"](
            rows.dtype is torch.float32,
            *self.norm_arguments,
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
            self.norm.eps,
            torch.get_num_threads(),
        )
        store_outputs(self.layers, normed, outputs)
        return normed


# --- the second half of a layer


class MlpHalf:
    """The norm and the gated MLP of a decoder layer."""

    __slots__ = ("arguments", "gated_settings", "layers", "mlp", "mlp_method", "norm")

    def __init__(
        self, norm: ReadNorm, mlp: Any, gated_settings: GatedSettings, layers: MlpRowLayers
    ) -> None:
        self.norm = norm
        self.mlp = mlp
        self.mlp_method = mlp.__dict__["forward"]
        self.gated_settings = gated_settings
        self.layers = layers
        inner = layers.inner
        down = layers.down
        self.arguments = (
            *norm.arguments(),
            GATED_KERNELS.address("forward"),
            activation_number(gated_settings.op),
            inner.addresses,
            inner.scales,
            len(inner.columns),
            down.addresses,
            down.scales,
        )

    def is_usable(self, x: Tensor) -> bool:
        mlp = self.mlp
        settings = self.gated_settings
        activation = mlp._modules.get(settings.activation) or mlp.__dict__.get(settings.activation)
        has_hooks = (
            mlp._forward_hooks
            or mlp._forward_pre_hooks
            or mlp._backward_hooks
            or mlp._backward_pre_hooks
            or getattr(activation, "_forward_hooks", None)
        )
        return not has_hooks and activation is settings.function and self.layers.is_usable(x)

    def is_current(self) -> bool:
        return (
            self.norm.is_current()
            and self.mlp.__dict__.get("forward") is self.mlp_method
            and self.layers.is_current()
        )

    def compute(self, x: Tensor, residual: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        KERNELS.calls["decode_mlp_half"](
            x.dtype is torch.float32,
            x.data_ptr(),
            residual.contiguous().data_ptr(),
            y.data_ptr(),
            *self.arguments,
            x.numel() // x.shape[-1],
            self.norm.eps,
            torch.get_num_threads(),
        )
        return y
