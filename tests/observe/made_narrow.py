"""Programs whose numbers are rounded when they are made: a dropout's scale in a narrow dtype, which arithmetic widens without a cast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .program import program
from .tiny import MLP, TinyRMSNorm, tiny

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


class NarrowDropout(MLP):
    """The same in other places of a program, which subclasses choose."""

    dtype, number = torch.float16, 1 / (1 - RATE)

    def scale(self, y: Tensor) -> Tensor:
        return torch.full(y.shape, self.number, dtype=self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return self.dropped(y).to(y.dtype)

    def dropped(self, y: Tensor) -> Tensor:
        return y * self.scale(y)


class Recomputed(NarrowDropout):
    def dropped(self, y: Tensor) -> Tensor:
        return checkpoint(super().dropped, y, use_reentrant=False)


class ScaledBackward(torch.autograd.Function):
    """Scales by a number of Python in forward, and by a narrow fill in backward."""

    @staticmethod
    def forward(ctx, y: Tensor, number: float, dtype: torch.dtype) -> Tensor:
        ctx.number, ctx.dtype = number, dtype
        return y * number

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:
        return (dy * torch.full(dy.shape, ctx.number, dtype=ctx.dtype)).to(dy.dtype), None, None


class InAFunction(NarrowDropout):
    def dropped(self, y: Tensor) -> Tensor:
        return ScaledBackward.apply(y, self.number, self.dtype)


class ScaledNorm(TinyRMSNorm):
    dtype, number = torch.float16, 1 / (1 - RATE)

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x).float() * torch.full(x.shape, self.number, dtype=self.dtype)).to(x.dtype)


PLACES = (NarrowDropout, Recomputed, InAFunction, ScaledNorm)


def in_place_of(made: type, dtype: torch.dtype, number: float) -> Callable[[], torch.nn.Module]:
    part = "norm1" if made is ScaledNorm else "mlp"
    return lambda: tiny(**{part: type(made.__name__, (made,), {"dtype": dtype, "number": number})})


for name, make in MAKERS.items():
    program(f"{name}_in_fp32", lambda make=make: tiny(mlp=dropout(make, torch.bfloat16)), preset="fp32")
for made in PLACES:
    program(f"{made.__name__}_in_bf16-mixed", in_place_of(made, torch.float16, 1 / (1 - RATE)))
