"""The declared dtype rule of `gelu`. F is a free float dtype."""

from __future__ import annotations

from ..contract import OpContract

GELU = OpContract("x: F[*n d] -> F[*n d]", inside="fp32", grads={"x": "F"}, autocast="ignored")
