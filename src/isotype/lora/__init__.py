"""Fused LoRA over PEFT's own layers: `fuse_lora(model)` attaches it, `unfuse_lora(model)` removes it.

attach     which layers the fused code computes exactly as PEFT does, and the forward that it gets;
           layers of one input share a function
linear     the op: its dtypes, the base product, the adapter's branch, and every gradient
group      several projections of one input in one function
mlp        a gated MLP in one function, and when its layers run so
dora       DoRA: LoRA's function and a trained scale for each output
quantised  packed weights, dequantised once for each use, and linear layers over them
products   the adapters' own products with fp32 sums; A and B in the dtype of the products
"""

from .attach import fuse_lora, unfuse_lora
from .linear import lora_linear
from .quantised import PackedLinear, forward_4bit, is_4bit, is_packed

__all__ = [
    "PackedLinear",
    "forward_4bit",
    "fuse_lora",
    "is_4bit",
    "is_packed",
    "lora_linear",
    "unfuse_lora",
]
