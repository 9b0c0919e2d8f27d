"""The declared dtype rule of `linear_log_probs`: the product follows autocast, per-token values are fp32, each gradient is its tensor's."""

from __future__ import annotations

from ..contract import OpContract

LINEAR_LOG_PROBS = OpContract(
    "hidden: X[*n H], weight: W[V H], targets: int[*n] -> fp32|fp64[*n], fp32|fp64[*n], fp32|fp64[*n]",
    inside="fp32",
    grads={"hidden": "X", "weight": "W"},
    autocast="fp32",
)
