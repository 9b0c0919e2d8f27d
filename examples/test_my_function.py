"""A kernel author's test file: `pytest test_my_function.py`. The fixture `ampcheck` comes from
Isotype's pytest plugin.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isotype.ops import OpContract

CONTRACT = OpContract("x: F[*n d] -> F[*n d]", inside="fp32", grads={"x": "F"}, autocast="ignored")


class SquaredReLU(torch.autograd.Function):
    """relu(x) ** 2, computed in fp32 whatever x is."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x if x.dtype == torch.float64 else x.float()
        return wide.relu().square().to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wide = x if x.dtype == torch.float64 else x.float()
        return (2 * wide.relu() * dy.to(wide.dtype)).to(x.dtype)


class Careless(SquaredReLU):
    """The same with a backward that overwrites the gradient it is handed."""

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return dy.mul_(2 * x.relu())


def squared_relu(x: Tensor) -> Tensor:
    return SquaredReLU.apply(x)


def careless(x: Tensor) -> Tensor:
    return Careless.apply(x)


def reference(x: Tensor) -> Tensor:
    return x.relu().square()


def test_keeps_its_contract(ampcheck):
    ampcheck(squared_relu, (torch.randn(8, 16),), reference=reference, contract=CONTRACT)


def test_the_careless_one_is_found(ampcheck):
    from isotype.testing import ConformanceError

    with pytest.raises(ConformanceError, match="AC008"):
        ampcheck(careless, (torch.randn(8, 16),), reference=reference, contract=CONTRACT)
