"""The declared dtype rule of `cross_entropy`. F is a free float dtype; the loss is fp32 (fp64 for fp64 logits) with autocast on or off."""

from __future__ import annotations

from ..contract import OpContract

CROSS_ENTROPY = OpContract(
    "logits: F[*n V], targets: int[*n] -> fp32|fp64[...]",
    inside="fp32",
    grads={"logits": "F"},
    autocast="ignored",
)
