"""Computes PEFT's LoRA layers with fused code. `fuse_lora(model)` installs this code, and
`unfuse_lora(model)` removes it.

attach     finds the layers that the fused code computes exactly as PEFT does, and replaces their
           forward
linear     one LoRA layer: its dtypes, the matrix product with the base weight, the adapter's
           branch, and all gradients
group      several LoRA layers with the same input (such as Q, K and V) in one autograd function
mlp        a gated MLP in one autograd function
dora       DoRA, which multiplies each output of a LoRA layer by a trained scale
served     LoRA layers that multiply by the rounded weight that the exported file will contain
quantised  packed weights, which are dequantised for each use, and linear layers with such weights
products   matrix products with A and B that are summed in fp32, and casts of A and B
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
