"""A test file for the author of a kernel: `pytest test_my_function.py`. Isotype's pytest plugin has
the fixture `ampcheck`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isotype.ops import OpContract

CONTRACT = OpContract("x: F[*n d] -> F[*n d]", inside="fp32", grads={"x": "F"}, autocast="ignored")


class SquaredReLU(torch.autograd.Function):
    """relu(x) ** 2, computed in fp32 for fp16 and bf16 too."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        x_fp32 = x if x.dtype == torch.float64 else x.float()
        return x_fp32.relu().square().to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        x_fp32 = x if x.dtype == torch.float64 else x.float()
        return (2 * x_fp32.relu() * dy.to(x_fp32.dtype)).to(x.dtype)


class OverwritesGradient(SquaredReLU):
    """The same function with a faulty backward, which overwrites the incoming gradient."""

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return dy.mul_(2 * x.relu())


def squared_relu(x: Tensor) -> Tensor:
    return SquaredReLU.apply(x)


def faulty_squared_relu(x: Tensor) -> Tensor:
    return OverwritesGradient.apply(x)


def reference(x: Tensor) -> Tensor:
    return x.relu().square()


def test_keeps_its_contract(ampcheck):
    ampcheck(squared_relu, (torch.randn(8, 16),), reference=reference, contract=CONTRACT)


def test_the_faulty_backward_is_found(ampcheck):
    from isotype.testing import ConformanceError

    with pytest.raises(ConformanceError, match="AC008"):
        ampcheck(faulty_squared_relu, (torch.randn(8, 16),), reference=reference, contract=CONTRACT)
