"""The declared dtype rule of `gelu_mul`. F is a free float dtype."""

from __future__ import annotations

from ..contract import OpContract

GELU_MUL = OpContract("gate: F[*n d], up: F[*n d] -> F[*n d]", inside="fp32", grads={"gate": "F", "up": "F"}, autocast="ignored")
