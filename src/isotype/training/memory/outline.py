"""Adds bitsandbytes' 4-bit layers to a model on the meta device, so that a memory plan can include
them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from ...environment.hub_kernels import disable_hub_kernels
from ...ops.packed import PackedState

# elements per scale, and scales per second-level scale
ELEMENTS_PER_SCALE = 64
SCALES_PER_BLOCK = 256


def quantise_outline(
    model: Any, compute: torch.dtype, *, layers: Collection[nn.Module], double_quant: bool = True
) -> None:
    """Replaces `layers` of `model` by nf4 layers on the meta device. If `double_quant` is true, the
    scales of the new layers are quantised too.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child in layers:
                setattr(parent, name, _build_nf4_layer(child, compute, double_quant))
    model.is_loaded_in_4bit = True  # PEFT reads this attribute


def _build_nf4_layer(linear: nn.Linear, compute: torch.dtype, double_quant: bool) -> nn.Module:
    disable_hub_kernels()
    import bitsandbytes
    from bitsandbytes.functional import QuantState

    with torch.device("meta"):
        layer = bitsandbytes.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            compute_dtype=compute,
            quant_type="nf4",
        )
        if linear.bias is not None:
            layer.bias.data = linear.bias.data
        elements = linear.in_features * linear.out_features
        scales = -(-elements // ELEMENTS_PER_SCALE)
        weight: Any = nn.Parameter(
            torch.empty(-(-elements // 2), 1, dtype=torch.uint8), requires_grad=False
        )
        weight.compress_statistics = double_quant
        weight.quant_type = "nf4"
        inner = QuantState(
            absmax=torch.empty(-(-scales // SCALES_PER_BLOCK)),
            code=torch.empty(256),
            blocksize=SCALES_PER_BLOCK,
            dtype=torch.float32,
        )
        weight.quant_state = QuantState(
            absmax=torch.empty(scales, dtype=torch.uint8 if double_quant else torch.float32),
            shape=torch.Size((linear.out_features, linear.in_features)),
            code=torch.empty(16),
            blocksize=ELEMENTS_PER_SCALE,
            quant_type="nf4",
            dtype=compute,
            offset=torch.empty(()) if double_quant else None,
            state2=inner if double_quant else None,
        )
    layer.weight = weight
    layer.support_avx512bf16_for_cpu = False
    return layer


def quantisation_tensors(parameter: Tensor) -> list[Tensor]:
    """Returns the tensors that belong to a packed weight but are not parameters of the model: the
    scales and code tables.
    """
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return []
    if isinstance(state, PackedState):
        return list(state.tensors.values())
    inner = [state.state2.absmax, state.state2.code, state.offset] if state.nested else []
    return [t for t in (state.absmax, state.code, *inner) if isinstance(t, Tensor)]


def copy_quantisation(target: Any, parameter: Tensor, convert: Any) -> None:
    """Copies the quantisation state of `parameter` to `target`, the parameter that replaces it. In
    the copy, each tensor of the state is replaced by the result of `convert` for this tensor.
    """
    import copy

    state = getattr(parameter, "quant_state", None)
    if state is None:
        return
    if isinstance(state, PackedState):
        target.quant_state = state.map_tensors(convert)
        return
    copied_state = copy.copy(state)
    copied_state.absmax = convert(state.absmax)
    copied_state.code = convert(state.code)
    if state.nested:
        copied_state.offset = convert(state.offset)
        copied_state.state2 = copy.copy(state.state2)
        copied_state.state2.absmax = convert(state.state2.absmax)
        copied_state.state2.code = convert(state.state2.code)
    target.quant_state = copied_state


def scratch_sizes() -> dict[Any, Any]:
    """Returns a dictionary with one entry. Its key is bitsandbytes' operator for 4-bit matrix
    products, and its value is a function. The function returns how many bytes the operator needs in
    addition to its result. The operator needs these bytes for the dequantised weight.
    """
    disable_hub_kernels()
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        return {}

    def dequantised_bytes(x: Tensor, packed: Tensor, shape: Any, *_: Any, **__: Any) -> int:
        elements = int(shape[0]) * int(shape[1])
        return elements * x.element_size() + 4 * elements // ELEMENTS_PER_SCALE

    return {torch.ops.bitsandbytes.gemm_4bit.default: dequantised_bytes}
