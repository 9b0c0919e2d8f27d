"""Lets plain linear layers compute their bf16 or fp16 products in fp32 blocks, on a CPU without
instructions for these dtypes.

LoRA layers, fused MLPs and the head call `ops.widened_products` themselves. All other linear layers
are called by the model: every layer of a full fine-tuning, and the layers without an adapter.
PyTorch's gradient of the input of such a layer takes about a hundred times as long as in fp32.
"""

from __future__ import annotations

import torch
from torch import nn

from ..instance_method import install_forward
from ..lora.attach import (
    has_replaced_forward,
    is_lora,
    linear_for_few_rows,
    weight_blocker,
)
from ..ops.widened_products import emulated_dtypes


def place_linears(model: nn.Module, compute_dtype: torch.dtype | None) -> list[str]:
    """Replaces the forward of each plain linear layer, if the CPU emulates bf16. The matrices of an
    adapter are not changed, because the LoRA layer computes their products. Returns a note for the
    manifest if the weights or the declared compute dtype are bf16 or fp16.

    compute_dtype  the declared dtype of products; None without a declaration
    """
    if not emulated_dtypes():
        return []
    adapter_parts = {
        id(part)
        for layer in model.modules()
        if is_lora(layer)
        for name, child in layer.named_children()
        if name != "base_layer"
        for part in child.modules()
    }
    layers = [
        module
        for module in model.modules()
        if type(module) is nn.Linear
        and "forward" not in vars(module)
        and id(module) not in adapter_parts
        and not has_replaced_forward(module)
        and weight_blocker(module) is None
    ]
    for layer in layers:
        # no entry of the manifest describes it, since the layer computes what it computed before
        install_forward(layer, linear_for_few_rows, None, entries=0)
    dtypes = {parameter.dtype for parameter in model.parameters()} | {compute_dtype}
    if not dtypes & emulated_dtypes():
        return []
    return ["this CPU has no bf16 instructions: products of bf16 are computed in blocks of fp32"]
