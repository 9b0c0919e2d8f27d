"""The declared dtype rule of `rms_norm`: the output is x's dtype whatever the weight's, unless the caller names another."""

from __future__ import annotations

from ..contract import OpContract

RMS_NORM = OpContract("x: X[*n H], weight: W[H] -> X[*n H]", inside="fp32", grads={"x": "X", "weight": "W"}, autocast="ignored")
