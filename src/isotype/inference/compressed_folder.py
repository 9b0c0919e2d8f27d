"""Writes folders in the format of compressed-tensors, which vLLM serves. Linear layers are
rounded to fp8, int8, int4, nvfp4 or mxfp4; the head, the embedding and vectors keep their dtype.

Only weights are rounded. A server then multiplies by exactly these weights (W8A16, W4A16), and does
not round activations.

Source: compressed-tensors 0.20 (`config`, `compressors`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..dtypes import to_torch
from ..model.served import ServedFormat
from ..ops.packed import PackedState
from ..ops.packed.quantise import MXFP4_BLOCK, NVFP4_BLOCK
from .run_weights import RunWeights

WEIGHTS_FILE = "model.safetensors"
# format -> (name of the file format, settings of a weight)
_SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "int8": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group"}),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": NVFP4_BLOCK,
            "scale_dtype": "torch.float8_e4m3fn",
        },
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "group",
            "group_size": MXFP4_BLOCK,
            "scale_dtype": "torch.uint8",
        },
    ),
}


def quantisation_settings(served: ServedFormat, unrounded: Iterable[str]) -> dict[str, Any]:
    """Returns the entry `quantization_config` of config.json.

    unrounded  the names of linear layers that are not rounded
    """
    file_format, weights = _SCHEMES[served.name]
    weights = {**weights, "symmetric": True, "dynamic": False}
    if served.name == "int4":
        weights["group_size"] = served.group
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": file_format,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": sorted(unrounded),
        "config_groups": {"group_0": group},
    }


def write_weights(
    folder: Path, weights: RunWeights, served: ServedFormat, dtype: str, *, skipped: str | None
) -> int:
    """Writes the weights of a run, and adds the quantisation to the config.json that is in the
    folder. Returns the number of rounded weights.

    dtype    the dtype of weights that are not rounded
    skipped  the name of the head if it shares the embedding's weight and is therefore not written
    """
    tensors: dict[str, Tensor] = {}
    count = 0
    # a run that was trained for this format has the values before their rounding rounded here
    is_trained_format = weights.served is not None and weights.served.name == served.name
    read = weights.unrounded if is_trained_format else weights.trained
    for name, parameter in weights.parameters.items():
        if name == skipped:
            continue
        value = read(name)
        if not served.rounds(parameter):
            tensors[name] = value.to(to_torch(dtype)).contiguous().cpu()
            continue
        packed, state = served.pack(value, parameter)
        if weights.served is None and name not in weights.changed_names:
            packed, state = _published(parameter, packed, state)
        owner = name.removesuffix("weight")
        for part, tensor in file_tensors(packed, state).items():
            tensors[f"{owner}{part}"] = tensor.contiguous().cpu()
        count += 1
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    head = weights.inner.get_output_embeddings()
    unrounded = [
        name
        for name, module in weights.inner.named_modules()
        if isinstance(module, nn.Linear) and module is head
    ]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = quantisation_settings(served, unrounded)
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    return count


def _published(parameter: Tensor, packed: Tensor, state: PackedState) -> tuple[Tensor, PackedState]:
    """Returns the packed weight that the base was published with, if it has the same format and the
    same global scale as the new packed weight (`packed` and `state`). Otherwise returns the new
    packed weight.
    """
    base_state = getattr(parameter, "quant_state", None)
    if not isinstance(base_state, PackedState) or base_state.layout != state.layout:
        return packed, state
    if base_state.tensors.keys() != state.tensors.keys():
        return packed, state
    global_scale = state.tensors.get("weight_global_scale")
    if global_scale is not None and not torch.equal(
        global_scale, base_state.tensors["weight_global_scale"]
    ):
        return packed, state
    _, dtype, shape = base_state.layout.packed_tensor
    return parameter.data.view(dtype).view(shape), base_state


def file_tensors(packed: Tensor, state: PackedState) -> dict[str, Tensor]:
    """Returns the tensors that a file stores for one rounded weight."""
    tensors = {state.layout.packed_tensor[0]: packed, **state.tensors}
    if state.layout.format == "packed_rows":
        tensors["weight_shape"] = torch.tensor(state.layout.shape)
    return tensors
