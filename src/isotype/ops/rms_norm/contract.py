"""The declared dtype rule of `rms_norm`: the output has x's dtype, for a weight of any dtype, unless the caller names another."""

from __future__ import annotations

from ..contract import OpContract

RMS_NORM = OpContract("x: X[*n H], weight: W[H] -> X[*n H]", inside="fp32", grads={"x": "X", "weight": "W"}, autocast="ignored")

ADD_RMS_NORM = OpContract(
    "x: F[*n H], residual: F[*n H], weight: W[H] -> F[*n H], F[*n H]",
    inside="fp32",
    grads={"x": "F", "residual": "F", "weight": "W"},
    autocast="ignored",
)
