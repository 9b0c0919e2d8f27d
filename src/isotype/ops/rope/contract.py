"""The declared dtype rule of `rope`: q and k keep their dtypes; the tables may be wider."""

from __future__ import annotations

from ..contract import OpContract

ROPE = OpContract(
    "q: Q[B N S D], k: K[B M S D], cos: C[*t S R], sin: C[*t S R] -> Q[B N S D], K[B M S D]",
    inside="fp32",
    grads={"q": "Q", "k": "K"},
    autocast="ignored",
)
