"""What a memory plan makes of a model without data: 4-bit layers of bitsandbytes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.packed import PackedState

# elements a scale, scales a scale of scales
BLOCK = 64
INNER_BLOCK = 256


def quantise_outline(
    model: Any, compute: torch.dtype, *, layers: Collection[nn.Module], double: bool = True
) -> None:
    """Replaces `layers` of `model` by nf4 layers on the meta device; with `double` their scales are
    quantised too.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child in layers:
                setattr(parent, name, _layer(child, compute, double))
    model.is_loaded_in_4bit = True  # what PEFT asks


def _layer(linear: nn.Linear, compute: torch.dtype, double: bool) -> nn.Module:
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
        scales = -(-elements // BLOCK)
        weight: Any = nn.Parameter(
            torch.empty(-(-elements // 2), 1, dtype=torch.uint8), requires_grad=False
        )
        weight.compress_statistics = double
        weight.quant_type = "nf4"
        inner = QuantState(
            absmax=torch.empty(-(-scales // INNER_BLOCK)),
            code=torch.empty(256),
            blocksize=INNER_BLOCK,
            dtype=torch.float32,
        )
        weight.quant_state = QuantState(
            absmax=torch.empty(scales, dtype=torch.uint8 if double else torch.float32),
            shape=torch.Size((linear.out_features, linear.in_features)),
            code=torch.empty(16),
            blocksize=BLOCK,
            quant_type="nf4",
            dtype=compute,
            offset=torch.empty(()) if double else None,
            state2=inner if double else None,
        )
    layer.weight = weight
    layer.support_avx512bf16_for_cpu = False
    return layer


def scales_of(parameter: Tensor) -> list[Tensor]:
    """The tensors that belong to a packed weight but are not parameters of the model: scales and
    code tables.
    """
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return []
    if isinstance(state, PackedState):
        return list(state.tensors.values())
    inner = [state.state2.absmax, state.state2.code, state.offset] if state.nested else []
    return [t for t in (state.absmax, state.code, *inner) if isinstance(t, Tensor)]


def take_scales(made: Any, parameter: Tensor, make: Any) -> None:
    """Copies the quantisation state of `parameter` to its replacement `made`, with `make` applied
    to every tensor.
    """
    import copy

    state = getattr(parameter, "quant_state", None)
    if state is None:
        return
    if isinstance(state, PackedState):
        made.quant_state = state.map_tensors(make)
        return
    new = copy.copy(state)
    new.absmax = make(state.absmax)
    new.code = make(state.code)
    if state.nested:
        new.offset = make(state.offset)
        new.state2 = copy.copy(state.state2)
        new.state2.absmax = make(state.state2.absmax)
        new.state2.code = make(state.state2.code)
    made.quant_state = new


def scratch() -> dict[Any, Any]:
    """The memory that bitsandbytes' 4-bit product needs besides its result: the dequantised weight."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        return {}

    def widened(x: Tensor, packed: Tensor, shape: Any, *_: Any, **__: Any) -> int:
        elements = int(shape[0]) * int(shape[1])
        return elements * x.element_size() + 4 * elements // BLOCK

    return {torch.ops.bitsandbytes.gemm_4bit.default: widened}
