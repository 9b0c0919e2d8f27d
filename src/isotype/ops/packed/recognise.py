"""Recognises a packed weight and its format from the names, dtypes and shapes of its tensors in a
checkpoint.

Block sizes and GPTQ's version cannot be derived from the tensors; they come from config.json
(`precision.packing`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import UsageError
from ...precision.packing import Packing
from .formats import Layout
from .ggml import BLOCKS, find_non_finite
from .state import PackedState

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)  # dtypes of 8-bit floats
SERVING_TENSORS = (
    "input_scale",
    "activation_scale",
    "input_global_scale",
    "input_zero_point",
    "k_scale",
    "v_scale",
    "weight_format",
)
"""Tensors stored beside a packed weight that only servers use, for activations and caches."""
TORCHAO_NAMES = {
    "_weight_qdata": "weight",
    "_weight_scale": "weight_scale",
    "_weight_zero_point": "weight_zero_point",
}
"""The names of torchao's tensors in safetensors files -> the names in other formats."""
PACKED_TENSOR_NAMES = frozenset((
    "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "weight_zero_point", "weight_shape",
    "weight_g_idx", "SCB", "qweight", "qzeros", "scales", "g_idx", *BLOCKS, *TORCHAO_NAMES,
))  # fmt: skip
"""Names that only packed weights have."""
# names of the tensors that contain the scales of a weight
_SCALES = (
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "SCB",
    "scales",
)


class TensorHeader(NamedTuple):
    """The dtype and shape of a tensor in a file's header."""

    dtype: torch.dtype
    shape: tuple[int, ...]


TensorHeaders = Mapping[str, TensorHeader]


def is_packed(headers: TensorHeaders) -> bool:
    """Whether these tensors belong to a packed weight. This may be true even if some tensors of the
    weight are missing.
    """
    weight = headers.get("weight")
    return bool(PACKED_TENSOR_NAMES & headers.keys()) or (
        weight is not None and weight.dtype in (*FP8, torch.int8, torch.uint8, torch.int32)
    )


def recognise_layout(
    layer: str, headers: TensorHeaders, packing: Packing, shape: tuple[int, int]
) -> Layout:
    """Returns the layout of one layer's packed weight: its format, block size and shape.

    layer   the name of the layer, for messages
    shape   [O K] of the weight in the model
    Raises  UsageError if a tensor is missing or has another shape; the message names it
    """
    headers = {TORCHAO_NAMES.get(name, name): header for name, header in headers.items()}
    if packing.required_tensor and "weight" not in headers:
        _require_tensor(layer, headers, packing.required_tensor)
    weight = headers.get("weight")
    if "qweight" in headers:
        return _column_packed_layout(layer, headers, packing, shape)
    if "weight_packed" in headers:
        return _packed_rows_layout(layer, headers, packing, shape)
    if kind := next((name for name in headers if name in BLOCKS), None):
        numbers, size, _ = BLOCKS[kind]
        _check_shape(layer, headers, kind, (shape[0], shape[1] // numbers * size))
        return Layout("ggml", shape, (kind, torch.uint8, headers[kind].shape), (1, numbers))
    if weight is None:
        raise UsageError(
            f"{layer} has {', '.join(sorted(headers))}, but no weight to which they belong",
            fix=RELOAD_ADVICE,
        )
    if weight.dtype == torch.uint8 and packing.dtype_name == "nvfp4":
        return _nvfp4_layout(layer, headers, packing, shape, "weight")
    _check_shape(layer, headers, "weight", shape)
    if "SCB" in headers:
        _check_shape(layer, headers, "SCB", (shape[0],))
        return Layout("int8_rows", shape, ("weight", torch.int8, shape), (1, shape[1]))
    name = next((name for name in ("weight_scale", "weight_scale_inv") if name in headers), None)
    if name is None or weight.dtype not in (*FP8, torch.int8):
        description = f"{layer}.weight is {str(weight.dtype).removeprefix('torch.')}"
        raise UsageError(
            f"{description} and has no scale beside it: weight_scale, weight_scale_inv or SCB",
            fix=RELOAD_ADVICE,
        )
    scale = headers[name]
    if "weight_zero_point" in headers and _count_elements(
        headers["weight_zero_point"]
    ) != _count_elements(scale):
        _check_shape(layer, headers, "weight_zero_point", tuple(scale.shape))
    has_exponent_scales = scale.dtype in (torch.uint8, torch.float8_e8m0fnu)
    if _count_elements(scale) == 1 or scale.shape in ((shape[0],), (shape[0], 1)):
        return Layout(
            "scaled",
            shape,
            ("weight", weight.dtype, shape),
            (1, shape[1]),
            has_exponent_scales=has_exponent_scales,
        )
    block = _matching_block(layer, name, scale.shape, packing, shape)
    return Layout(
        "scaled",
        shape,
        ("weight", weight.dtype, shape),
        block,
        has_exponent_scales=has_exponent_scales,
    )


def _packed_rows_layout(
    layer: str, headers: TensorHeaders, packing: Packing, shape: tuple[int, int]
) -> Layout:
    if headers["weight_packed"].dtype == torch.uint8:
        if packing.dtype_name == "nvfp4":
            return _nvfp4_layout(layer, headers, packing, shape, "weight_packed")
        _check_shape(layer, headers, "weight_packed", (shape[0], shape[1] // 2))
        _check_shape(layer, headers, "weight_scale", (shape[0], -(-shape[1] // 32)))
        return Layout(
            "mxfp4", shape, ("weight_packed", torch.uint8, headers["weight_packed"].shape), (1, 32)
        )
    bits = packing.bits
    _check_shape(layer, headers, "weight_packed", (shape[0], -(-shape[1] * bits // 32)))
    scale = _require_tensor(layer, headers, "weight_scale").shape
    if len(scale) < 2 or scale[1] == 1:
        size = shape[1]
    else:
        size = _matching_block(layer, "weight_scale", scale, packing, shape)[1]
    if "weight_zero_point" in headers:
        _check_shape(
            layer, headers, "weight_zero_point", (-(-shape[0] * bits // 32), -(-shape[1] // size))
        )
    if "weight_g_idx" in headers:
        _check_shape(layer, headers, "weight_g_idx", (shape[1],))
    return Layout(
        "packed_rows",
        shape,
        ("weight_packed", torch.int32, headers["weight_packed"].shape),
        (1, size),
        bits,
    )


def _nvfp4_layout(
    layer: str, headers: TensorHeaders, packing: Packing, shape: tuple[int, int], weight_name: str
) -> Layout:
    global_scale = "weight_scale_2" if weight_name == "weight" else "weight_global_scale"
    if _count_elements(_require_tensor(layer, headers, global_scale)) != 1:
        _check_shape(layer, headers, global_scale, (1,))
    _check_shape(layer, headers, weight_name, (shape[0], shape[1] // 2))
    _check_shape(layer, headers, "weight_scale", (shape[0], -(-shape[1] // 16)))
    return Layout("nvfp4", shape, (weight_name, torch.uint8, headers[weight_name].shape), (1, 16))


def _column_packed_layout(
    layer: str, headers: TensorHeaders, packing: Packing, shape: tuple[int, int]
) -> Layout:
    (rows, columns), bits = shape, packing.bits
    size = packing.blocks[0][1]
    size = columns if size == -1 else size
    groups = -(-columns // size)
    if packing.library == "awq":
        _check_shape(layer, headers, "qweight", (columns, rows // 8))
        _check_shape(layer, headers, "qzeros", (groups, rows // 8))
    else:
        _check_shape(layer, headers, "qweight", (columns * bits // 32, rows))
        _check_shape(layer, headers, "qzeros", (groups, rows * bits // 32))
        if "g_idx" in headers:
            _check_shape(layer, headers, "g_idx", (columns,))
    _check_shape(layer, headers, "scales", (groups, rows))
    name = "awq" if packing.library == "awq" else "gptq"
    return Layout(
        name,
        shape,
        ("qweight", torch.int32, headers["qweight"].shape),
        (1, size),
        bits,
        packing.zero_point_offset,
    )


RELOAD_ADVICE = (
    "download the files again, or save the model again with the library that quantised it"
)


def _count_elements(header: TensorHeader) -> int:
    return int(torch.Size(header.shape).numel())


def _require_tensor(layer: str, headers: TensorHeaders, name: str) -> TensorHeader:
    if name not in headers:
        raise UsageError(
            f"{layer}.{name} is missing; the file has {', '.join(sorted(headers))}",
            fix=RELOAD_ADVICE,
        )
    return headers[name]


def _check_shape(layer: str, headers: TensorHeaders, name: str, shape: tuple[int, ...]) -> None:
    actual = _require_tensor(layer, headers, name).shape
    if tuple(actual) != shape:
        raise UsageError(
            f"{layer}.{name} is {list(actual)}, expected {list(shape)}", fix=RELOAD_ADVICE
        )


def _matching_block(
    layer: str, name: str, actual: tuple[int, ...], packing: Packing, shape: tuple[int, int]
) -> tuple[int, int]:
    """Returns the block size from config.json that fits a scale of this shape. The block size
    cannot be computed from the shapes, since the last block may be smaller.
    """
    blocks = [(rows, shape[1] if columns == -1 else columns) for rows, columns in packing.blocks]
    matching = [
        block
        for block in blocks
        if tuple(actual) == (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    ]
    if len(matching) != 1:
        block_texts = " or ".join(f"{rows} x {columns}" for rows, columns in blocks)
        problem = "fits no block" if not matching else "fits two blocks"
        raise UsageError(
            f"{layer}.{name} is {list(actual)} for a weight of {list(shape)}: it {problem} of"
            f" config.json's quantization_config ({block_texts})",
            fix=RELOAD_ADVICE,
        )
    return matching[0]


def build_state(
    layer: str, layout: Layout, dtype_name: str, tensors: Mapping[str, Tensor]
) -> PackedState:
    """Creates the state of a weight from its loaded tensors.

    Raises  UsageError for a scale or an fp8 weight that is not finite
    """
    state_tensors = {
        name: tensor.detach()
        for name, tensor in tensors.items()
        if name not in (layout.packed_tensor[0], "weight_shape", *SERVING_TENSORS)
    }
    for name in (*_SCALES, layout.packed_tensor[0]):
        tensor = tensors.get(name)
        if (
            tensor is None
            or tensor.is_meta
            or (
                name == layout.packed_tensor[0]
                and tensor.dtype not in FP8
                and layout.format != "ggml"
            )
        ):
            continue
        is_bad = (
            find_non_finite(name, tensor) if layout.format == "ggml" else _find_non_finite(tensor)
        )
        if bool(is_bad.any()):
            raise UsageError(
                f"{layer}.{name} is not finite at {is_bad.nonzero()[0].tolist()}"
                f" ({int(is_bad.sum())} in all)",
                fix=RELOAD_ADVICE,
            )
    for name in ("g_idx", "weight_g_idx"):
        # files without act-order may contain it too
        if (
            name in state_tensors
            and not state_tensors[name].is_meta
            and torch.equal(
                state_tensors[name].long(), _sequential_groups(state_tensors[name], layout.block[1])
            )
        ):
            del state_tensors[name]
    if layout.format == "scaled":
        rows = layout.shape[0]
        for scale_name in ("weight_scale", "weight_scale_inv"):
            if scale_name in state_tensors:
                state_tensors["weight_scale"] = scale = state_tensors.pop(scale_name)
                if scale.numel() in (1, rows) and layout.block == (1, layout.shape[1]):
                    state_tensors["weight_scale"] = (
                        scale.reshape(-1, 1).expand(rows, 1).contiguous()
                    )
        if "weight_zero_point" in state_tensors:
            zero = state_tensors["weight_zero_point"]
            state_tensors["weight_zero_point"] = (
                zero.reshape(*zero.shape[:1], -1)
                .expand_as(state_tensors["weight_scale"])
                .contiguous()
            )
    if layout.format == "packed_rows":
        state_tensors["weight_scale"] = state_tensors["weight_scale"].reshape(layout.shape[0], -1)
    return PackedState(layout, dtype_name, state_tensors)


def _sequential_groups(column_groups: Tensor, size: int) -> Tensor:
    return torch.arange(column_groups.numel(), device=column_groups.device) // size


def _find_non_finite(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.uint8:
        return tensor == 255
    if tensor.dtype in FP8:
        return (tensor.view(torch.uint8) & 0x7F) > (
            0x7E if tensor.dtype == torch.float8_e4m3fn else 0x7B
        )
    return ~tensor.float().isfinite()
