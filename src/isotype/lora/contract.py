"""The declared dtype rule of `lora_linear`, for a dense weight. Without autocast X and W are one dtype."""

from __future__ import annotations

from ..ops.contract import OpContract

LORA_LINEAR = OpContract(
    "x: X[*n k], weight: W[o k], a: A[r k], b: A[o r] -> X[*n o]",
    inside="X, or fp32 for the branch of an adapter whose dtype is not X",
    grads={"x": "X", "weight": "W", "a": "A", "b": "A"},
    autocast="follows",
)
