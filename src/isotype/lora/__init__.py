"""Fused LoRA over PEFT's own layers: `fuse_lora(model)` attaches it, `unfuse_lora(model)` takes it
off.

attach     which layers the fused code computes exactly as PEFT does, and its forward on each; how
           siblings of one input share a product
linear     the op: its dtypes, the base product, the adapter branch, and every gradient
group      several projections of one input in one product
mlp        a gated MLP in one function, and when its layers run so
quantised  packed weights: widened once per use, and linear layers over them
products   the adapters' own products, with fp32 sums; A and B cast once for all micro-batches of a
           step
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
