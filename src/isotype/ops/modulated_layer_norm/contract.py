"""The declared dtype rule of `modulated_layer_norm`: the output has x's dtype, for scale and shift of any one dtype."""

from __future__ import annotations

from ..contract import OpContract

MODULATED_LAYER_NORM = OpContract(
    "x: X[B T H], scale: M[B H], shift: M[B H] -> X[B T H]",
    inside="fp32",
    grads={"x": "X", "scale": "M", "shift": "M"},
    autocast="ignored",
)
