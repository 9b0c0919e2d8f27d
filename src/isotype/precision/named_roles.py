"""The roles of each named precision. Every role of every preset is written out, so that a preset can be read as a row of a table."""

from __future__ import annotations

_FP32_INSIDE = {"grads": "fp32", "reduce": "fp32", "optimizer": "fp32", "loss": "fp32", "norms": "fp32"}

NAMED_ROLES: dict[str, dict[str, str]] = {
    "fp32": dict(base="fp32", trainable="fp32", compute="fp32", generate="fp32", save="fp32", **_FP32_INSIDE),
    "bf16-mixed": dict(
        base="bf16", trainable="fp32", compute="bf16", generate="bf16", save="model bf16, adapter fp32", **_FP32_INSIDE
    ),
    "bf16-lora": dict(base="bf16", trainable="fp32", compute="bf16", generate="bf16", save="fp32", **_FP32_INSIDE),
    "nf4-lora": dict(base="nf4", trainable="fp32", compute="bf16", generate="bf16", save="fp32", **_FP32_INSIDE),
    "bf16-pure": dict(
        base="bf16", trainable="bf16", compute="bf16", generate="bf16", save="bf16", rounding="stochastic", **_FP32_INSIDE
    ),
    "fp16-mixed": dict(
        base="fp16", trainable="fp32", compute="fp16", generate="fp16",
        save="model fp16, adapter fp32", loss_scaling="dynamic", **_FP32_INSIDE,
    ),
}  # fmt: skip
