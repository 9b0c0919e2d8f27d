"""The declared dtype rule of `gated_residual`: the stream keeps its dtype, for a gate of any dtype."""

from __future__ import annotations

from ..contract import OpContract

GATED_RESIDUAL = OpContract(
    "residual: F[B T H], x: F[B T H], gate: M[B H] -> F[B T H]",
    inside="fp32",
    grads={"residual": "F", "x": "F", "gate": "M"},
    autocast="ignored",
)
