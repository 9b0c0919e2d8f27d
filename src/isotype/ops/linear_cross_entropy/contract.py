"""The declared dtype rule of `linear_cross_entropy`: the product follows autocast, the loss is fp32, each gradient is its tensor's."""

from __future__ import annotations

from ..contract import OpContract

LINEAR_CROSS_ENTROPY = OpContract(
    "hidden: X[*n H], weight: W[V H], targets: int[*n] -> fp32|fp64[...]",
    inside="fp32",
    grads={"hidden": "X", "weight": "W"},
    autocast="fp32",
)
