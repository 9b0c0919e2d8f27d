"""The named precisions, and what each is for."""

from __future__ import annotations

from .named_roles import NAMED_ROLES
from .precision import Precision

PRESETS: dict[str, Precision] = {name: Precision(**roles) for name, roles in NAMED_ROLES.items()}

ABOUT = {
    "fp32": "everything in fp32, the reference",
    "bf16-mixed": "full fine-tuning: fp32 weights, bf16 products",
    "bf16-lora": "LoRA: bf16 base, fp32 adapters",
    "nf4-lora": "QLoRA: 4-bit base, fp32 adapters",
    "bf16-pure": "full fine-tuning in half the memory: bf16 weights with stochastic rounding, fp32 gradients",
    "fp16-mixed": "for GPUs without bf16: fp16 products with loss scaling; activations above 65504 overflow",
}
