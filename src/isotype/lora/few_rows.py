"""Computes linear layers with adapters for the few rows of a generated token. One call of a C++
kernel computes all layers that have the same input, with x Aᵀ.

Within a call of `generate`, neither the weights nor the adapters change. The addresses that the
kernel reads are therefore kept from one token to the next (`RowLayers`). Each call still checks
that PEFT's settings, the tensors and their addresses are the same (`is_current`). A tensor can get
another address without a change of its values: FSDP frees a gathered weight after a forward and
allocates memory for the same tensor object before the next one. There is no autograd function,
since no gradient is needed. With 30 layers of 64 features, a token takes 0.6 times as long as with
an autograd function and separate products for each layer.

Reading the weights takes most of the time. If all values of an fp32 weight are bf16 numbers, as in a
checkpoint in bf16, the kernel reads a copy in bf16 and computes in fp32. The results are the same,
and one row of 576 by 1536 x 576 takes 0.19 instead of 0.27 ms.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..ops.backend import PLAIN_TENSOR_TYPES, can_bypass_dispatcher, forced_backend
from .linear import LoraDtypes, Projection
from .products import KERNELS, MAX_FEW_ROWS, cast_adapters, kept_row_layers

# the kernel takes the outputs of up to three layers, such as Q, K and V
MAX_LAYERS = 3


class LayerState(Protocol):
    """What was read of a layer."""

    def is_current(self) -> bool:
        """Whether the layer still has the same tensors and settings."""
        ...


class RowLayers:
    """The layers that have the same input, as the kernel reads them.

    states     what was read of each layer, besides its tensors
    dtype      the dtype of the input, the weights and the outputs
    cast_dtype the dtype of autocast when the layers were read; None if autocast was off
    columns    the number of output features of each layer
    addresses  the C++ struct `Layer` of each layer
    scales     the factor of each adapter branch
    kept       the tensors to which the addresses belong
    tensors    the weights, biases, A and B that were read
    tensor_addresses  the addresses of `tensors` when they were read
    """

    __slots__ = (
        "addresses",
        "cast_dtype",
        "columns",
        "dtype",
        "features",
        "kept",
        "max_elements",
        "scales",
        "states",
        "tensor_addresses",
        "tensors",
    )

    def __init__(
        self, states: Sequence[LayerState], projections: Sequence[Projection], dtype: torch.dtype
    ) -> None:
        first = projections[0]
        self.states = states
        self.dtype = dtype
        self.cast_dtype = _cpu_autocast_dtype()
        self.columns = [projection.weight.shape[0] for projection in projections]
        self.features = first.weight.shape[1]
        self.max_elements = self.features * MAX_FEW_ROWS
        joined_a, b_matrices = cast_adapters(
            [projection.a for projection in projections],
            [projection.b for projection in projections],
            like=first.weight,
            features=self.features,
            dtype=dtype,
        )
        fields: list[int] = []
        start = 0
        contiguous_b = []
        weights = []
        for projection, b in zip(projections, b_matrices):
            weight = projection.weight
            narrow_weight = narrow_exactly(weight) if dtype is torch.float32 else None
            if narrow_weight is not None:
                weight = narrow_weight
            weights.append(weight)
            bias = projection.bias
            ranks = 0
            b_pointer = 0
            if b is not None:
                ranks = b.shape[1]
                b = b.detach().contiguous()
                b_pointer = b.data_ptr()
            contiguous_b.append(b)
            fields += (
                weight.data_ptr(),
                weight.stride(0),
                0 if bias is None else bias.data_ptr(),
                weight.shape[0],
                joined_a.data_ptr() + start * self.features * joined_a.element_size(),
                self.features,
                b_pointer,
                ranks,
                ranks,
                narrow_weight is not None,
            )
            start += ranks
        scales = [projection.scale for projection in projections]
        self.addresses = (ctypes.c_int64 * len(fields))(*fields)
        self.scales = (ctypes.c_float * len(scales))(*scales)
        self.kept = joined_a, contiguous_b, weights, projections
        self.tensors = [
            tensor
            for projection in projections
            for tensor in (projection.weight, projection.bias, projection.a, projection.b)
            if tensor is not None
        ]
        self.tensor_addresses = list(map(Tensor.data_ptr, self.tensors))

    def is_usable(self, x: Tensor) -> bool:
        """Whether the kernel computes this call."""
        return (
            0 < x.numel() <= self.max_elements
            and x.dtype is self.dtype
            and x.shape[-1] == self.features
            and x.is_cpu
            and can_bypass_dispatcher(x)
            and _cpu_autocast_dtype() is self.cast_dtype
            and forced_backend() in (None, "cpp")
        )

    def is_current(self) -> bool:
        """Whether all layers still have the tensors and settings that were read, and the tensors
        still have the same addresses.
        """
        if list(map(Tensor.data_ptr, self.tensors)) != self.tensor_addresses:
            return False
        for state in self.states:  # noqa: SIM110  # a generator would add a call
            if not state.is_current():
                return False
        return True

    def allocate(self, x: Tensor) -> tuple[list[Tensor], list[int]]:
        """Returns the outputs for x, still without values, and their addresses."""
        leading = x.shape[:-1]
        outputs = []
        pointers = [0] * MAX_LAYERS
        for i, columns in enumerate(self.columns):
            y = x.new_empty((*leading, columns))
            pointers[i] = y.data_ptr()
            outputs.append(y)
        return outputs, pointers

    def project(self, x: Tensor) -> list[Tensor]:
        """Computes x Wᵀ + bias + scale (x Aᵀ) Bᵀ of each layer.

        x   F[*n K]   any strides
        ->  F[*n O] of each layer
        """
        if not x.is_contiguous():
            x = x.contiguous()
        outputs, pointers = self.allocate(x)
        KERNELS.calls["project_rows"](
            self.dtype is torch.float32,
            x.data_ptr(),
            self.addresses,
            self.scales,
            len(outputs),
            *pointers,
            x.numel() // self.features,
            self.features,
            torch.get_num_threads(),
        )
        return outputs


def narrow_exactly(weight_OK: Tensor) -> Tensor | None:
    """Returns a copy of an fp32 weight in bf16 if all values stay the same, as those of a checkpoint
    in bf16 do. Returns None otherwise, and if the copy would take too much memory
    (`KeptRowLayers.copy_bytes`).
    """
    kept = kept_row_layers()
    if kept is None or not weight_OK.is_contiguous():
        return None
    narrow_OK = kept.memory_for_copy(weight_OK.shape)
    if narrow_OK is None or not copy_exactly(weight_OK, narrow_OK):
        return None
    kept.keep_copy(narrow_OK)
    return narrow_OK


def copy_exactly(weight_OK: Tensor, narrow_OK: Tensor) -> bool:
    """Writes a contiguous fp32 weight to a bf16 tensor. Returns whether all values stay the same.
    Otherwise the function stops at a value that would change.
    """
    # not a tensor, since a tensor would have to be read through the dispatcher
    is_exact = ctypes.c_int64()
    KERNELS(
        "narrow_weight",
        weight_OK.detach(),
        narrow_OK,
        weight_OK.numel(),
        ctypes.addressof(is_exact),
    )
    return bool(is_exact.value)


def _cpu_autocast_dtype() -> torch.dtype | None:
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return None


def can_run_row_layers(
    x: Tensor, projections: Sequence[Projection], dtypes: LoraDtypes | None
) -> bool:
    """Whether the kernel can compute these layers for a few rows of x. x must have the dtype of the
    products.
    """
    dtype = x.dtype
    if (
        len(projections) > MAX_LAYERS
        or dtypes is None
        or dtypes.widens_branch
        or not dtypes.compute is dtypes.output is dtype
        or not x.is_cpu
    ):
        return False
    is_available = dtype in (torch.float32, torch.bfloat16) and KERNELS.load()
    return is_available and all(
        projection.quant_state is None
        and not projection.dropout
        and _has_rows(projection.weight, dtype)
        and (projection.bias is None or _has_rows(projection.bias, dtype))
        for projection in projections
    )


def _has_rows(tensor: Tensor, dtype: torch.dtype) -> bool:
    return (
        type(tensor) in PLAIN_TENSOR_TYPES
        and tensor.is_cpu
        and tensor.dtype is dtype
        and tensor.stride(-1) == 1
    )
