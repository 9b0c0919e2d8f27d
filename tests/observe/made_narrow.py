"""Programs whose numbers are rounded when they are made: a dropout's scale in a narrow dtype, which arithmetic widens without a cast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .program import program
from .tiny import MLP, tiny

RATE = 0.1
MAKERS: dict[str, Callable[[Tensor, float, torch.dtype], Tensor]] = {
    "full": lambda y, number, dtype: torch.full(y.shape, number, dtype=dtype),
    "tensor": lambda y, number, dtype: torch.tensor(number, dtype=dtype),
    "fill": lambda y, number, dtype: torch.empty(y.shape, dtype=dtype).fill_(number),
    "assigned": lambda y, number, dtype: _assigned(torch.zeros(y.shape, dtype=dtype), number),
    "masked_fill": lambda y, number, dtype: torch.zeros(y.shape, dtype=dtype).masked_fill(torch.rand(y.shape) > RATE, number),
    "where": lambda y, number, dtype: torch.where(torch.rand(y.shape) > RATE, torch.ones(y.shape, dtype=dtype), number),
    "linspace": lambda y, number, dtype: torch.linspace(0, number * y.shape[-1], y.shape[-1] + 1, dtype=dtype)[1:],
    "arange": lambda y, number, dtype: torch.arange(number, number * (y.shape[-1] + 0.5), number, dtype=dtype),
}


def _assigned(tensor: Tensor, number: float) -> Tensor:
    tensor[..., 1:] = number
    return tensor


def dropout(make: Callable[[Tensor, float, torch.dtype], Tensor], dtype: torch.dtype, number: float = 1 / (1 - RATE)) -> type[MLP]:
    """Scales what it keeps by a number that is made in `dtype`."""

    class Dropout(MLP):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return (y * make(y, number, dtype) * (torch.rand(y.shape) > RATE)).to(y.dtype)

    return Dropout


for name, make in MAKERS.items():
    program(f"{name}_in_fp32", lambda make=make: tiny(mlp=dropout(make, torch.bfloat16)), preset="fp32")
