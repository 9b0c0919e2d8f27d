"""The named precisions. Every role of every preset is written out: a preset is a table row, not a program."""

from __future__ import annotations

from .precision import Precision

_FP32_INSIDE = {"grads": "fp32", "reduce": "fp32", "optimizer": "fp32", "loss": "fp32", "norms": "fp32"}

PRESETS: dict[str, Precision] = {
    "fp32": Precision(base="fp32", trainable="fp32", compute="fp32", generate="fp32", save="fp32", **_FP32_INSIDE),
    "bf16-mixed": Precision(
        base="bf16", trainable="fp32", compute="bf16", generate="bf16", save="model bf16, adapter fp32", **_FP32_INSIDE
    ),
    "bf16-lora": Precision(base="bf16", trainable="fp32", compute="bf16", generate="bf16", save="fp32", **_FP32_INSIDE),
    "nf4-lora": Precision(base="nf4", trainable="fp32", compute="bf16", generate="bf16", save="fp32", **_FP32_INSIDE),
    "bf16-pure": Precision(
        base="bf16", trainable="bf16", compute="bf16", generate="bf16", save="bf16", rounding="stochastic", **_FP32_INSIDE
    ),
    "fp16-mixed": Precision(
        base="fp16", trainable="fp32", compute="fp16", generate="fp16",
        save="model fp16, adapter fp32", loss_scaling="dynamic", **_FP32_INSIDE,
    ),
}  # fmt: skip

ABOUT = {
    "fp32": "everything in fp32: the reference, and the choice where bf16 is not native",
    "bf16-mixed": "full fine-tuning: fp32 weights, bf16 products",
    "bf16-lora": "LoRA: bf16 base, fp32 adapters",
    "nf4-lora": "QLoRA: 4-bit base, fp32 adapters",
    "bf16-pure": "full fine-tuning in half the memory: bf16 weights with stochastic rounding, fp32 gradients",
    "fp16-mixed": "for GPUs without bf16: fp16 products with loss scaling; activations above 65504 overflow",
}
