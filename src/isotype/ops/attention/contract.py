"""The declared dtype rule of `attention`. F is a free float dtype, autocast's where that is on, as for a matrix product."""

from __future__ import annotations

from ..contract import OpContract

ATTENTION = OpContract(
    "query: F[B N S D], key: F[B M T D], value: F[B M T D] -> F[B N S D]",
    inside="fp32",
    grads={"query": "F", "key": "F", "value": "F"},
    autocast="follows",
)
