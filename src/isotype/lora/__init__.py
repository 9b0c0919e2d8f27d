"""Fused LoRA over PEFT's own layers: `fuse_lora(model)` attaches it, `unfuse_lora(model)` takes it off.

plain      which layers the fused code computes exactly as PEFT does
attach     the fused forward on each instance, the manifest
call       the tensors, scale and dtypes of one call, looked up at that call
dtypes     the dtypes of a call, decided once
linear     the op: base product, adapter branch, and every gradient
quantised  4-bit weights: dequantised once per use, and a linear layer over them
group      several projections of one input in one product
siblings   how the first of them passes the others their outputs
mlp        a gated MLP in one function
gated      whether an MLP's layers can run as that function
products   fp32 sums of narrow operands
narrow     A and B in the products' dtype, cast once for all micro-batches of a step
"""

from .attach import fuse_lora, unfuse_lora
from .linear import lora_linear
from .quantised import forward_4bit, is_4bit

__all__ = ["forward_4bit", "fuse_lora", "is_4bit", "lora_linear", "unfuse_lora"]
