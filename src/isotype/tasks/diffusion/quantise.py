"""The frozen denoiser as its precision declares it: in one dtype, or with the linear layers of its blocks in nf4.

diffusers quantises on a GPU only. Here bitsandbytes' layers are made from the loaded weights, one at a time, on the device of the run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...dtypes import to_torch
from ...model.load import require_bitsandbytes
from ...precision.keep_in_fp32 import is_kept_in_fp32, names_kept_in_fp32
from ...precision.precision import Precision
from .families import Family
from .pipeline_folder import PipelineFolder


def frozen_denoiser(folder: PipelineFolder, precision: Precision, device: torch.device) -> Any:
    """The folder's denoiser on `device`, without gradients. Raises UsageError."""
    loaded = folder.denoiser(to_torch(precision.unquantised)).requires_grad_(False)
    if precision.base == "nf4":
        quantise(loaded, folder.family, precision, device)
    return loaded.to(device)


def block_layers(denoiser: Any, classes: tuple[str, ...]) -> dict[str, nn.Linear]:
    """name -> each linear layer below a module whose class is one of `classes`."""
    blocks = tuple(f"{name}." for name, module in denoiser.named_modules() if type(module).__name__ in classes)
    return {name: module for name, module in denoiser.named_modules() if isinstance(module, nn.Linear) and name.startswith(blocks)}


def quantised_layers(denoiser: Any, family: Family, precision: Precision) -> dict[str, nn.Linear]:
    """name -> each linear layer that nf4 takes: those of the blocks, but for what the model keeps in fp32."""
    in_fp32 = names_kept_in_fp32(denoiser, to_torch(precision.unquantised))
    layers = block_layers(denoiser, family.blocks_of(denoiser))
    return {name: layer for name, layer in layers.items() if not is_kept_in_fp32(name, in_fp32)}


def quantise(denoiser: Any, family: Family, precision: Precision, device: torch.device) -> None:
    """Puts nf4 layers with doubly quantised scales in place of the blocks' linear layers. Raises UsageError without bitsandbytes."""
    require_bitsandbytes()
    import bitsandbytes

    for name, linear in quantised_layers(denoiser, family, precision).items():
        packed = bitsandbytes.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=linear.bias is not None, compute_dtype=to_torch(precision.compute),
            compress_statistics=True, quant_type="nf4", quant_storage=torch.uint8, device="meta",
        )  # fmt: skip
        packed.weight = bitsandbytes.nn.Params4bit(
            linear.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4", quant_storage=torch.uint8, module=packed
        )
        packed.bias = linear.bias
        parent, _, last = name.rpartition(".")
        setattr(denoiser.get_submodule(parent), last, packed.to(device))  # quantises
    denoiser.is_loaded_in_4bit = True  # PEFT asks
