"""Lets the layers of a model compute bf16 and fp16 products in fp32, on a CPU without instructions
for these dtypes.

LoRA layers, fused MLPs and the head call `ops.widened_products` themselves. All other layers are
called by the model: linear layers without an adapter and in full fine-tuning, convolutions (of
U-Nets, VAEs and vision towers), and attention that no op computes. PyTorch's bf16 convolution takes
about 50 times as long there as in fp32, and its gradient of the input of a linear layer about a
hundred times.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from ..instance_method import InstanceMethod, install_forward
from ..lora.attach import has_replaced_forward, is_lora, linear_for_few_rows, weight_blocker
from ..ops.widened_calls import run_with_widened_calls
from ..ops.widened_convolution import convolve, is_plain_convolution
from ..ops.widened_products import differentiable_linear, emulated_dtypes

# Only chooses where calls are replaced: a module whose class has another name computes the same
# with PyTorch's products
_ATTENTION_CLASS = re.compile("attn|attention", re.IGNORECASE)


def place_widened(model: nn.Module, compute_dtype: torch.dtype | None = None) -> list[str]:
    """Installs products in fp32 in each plain linear layer, convolution and attention module, if the
    CPU emulates bf16. The matrices of an adapter are not changed, because the LoRA layer computes
    their products. Returns a note for the manifest if the weights or the declared compute dtype are
    bf16 or fp16.

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
        if type(part) is nn.Linear
    }
    # no entry of the manifest describes these forwards, since a layer computes what it computed
    for module in model.modules():
        if id(module) in adapter_parts or "forward" in vars(module):
            continue
        if is_plain_convolution(module):
            if "_conv_forward" not in vars(module):
                method = InstanceMethod(convolve, module, "_conv_forward")
                install_forward(module, method, None, entries=0)
        elif type(module) is nn.Linear:
            if not has_replaced_forward(module) and weight_blocker(module) is None:
                install_forward(module, linear_for_few_rows, None, entries=0)
        elif _is_transposed_linear(module):
            install_forward(module, transposed_linear_forward, None, entries=0)
        elif _is_innermost_attention(module):
            method = InstanceMethod(run_with_widened_calls, module, arguments=())
            install_forward(module, method, None, entries=0)
    dtypes = {parameter.dtype for parameter in model.parameters()} | {compute_dtype}
    if not dtypes & emulated_dtypes():
        return []
    return ["this CPU has no bf16 instructions: products of bf16 are computed in blocks of fp32"]


def _is_innermost_attention(module: nn.Module) -> bool:
    """Whether this is a module with the name of an attention class that contains no other one."""
    if not _ATTENTION_CLASS.search(type(module).__name__):
        return False
    return not any(
        _ATTENTION_CLASS.search(type(part).__name__)
        for part in module.modules()
        if part is not module
    )


def _is_transposed_linear(module: nn.Module) -> bool:
    """Whether this is transformers' Conv1D, the linear layer of GPT-2, whose weight is [K J]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def transposed_linear_forward(layer: nn.Module, x: Tensor) -> Tensor:
    """Computes the forward of transformers' Conv1D."""
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    assert isinstance(bias, Tensor)
    return differentiable_linear(x, weight.t(), bias)
