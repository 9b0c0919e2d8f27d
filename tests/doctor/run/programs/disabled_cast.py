"""A setting switches a cast off, and a product in backward gets the dtype of forward's output."""

import enum
import sys

import torch
from torch import nn


class Cast(enum.Enum):
    NARROW = "narrow"
    DISABLED = "disabled"


def cast(x, kind):
    if kind is Cast.DISABLED:
        return x
    return x.to(torch.bfloat16)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, kinds):
        ctx.save_for_backward(weight)
        ctx.kinds = kinds
        return torch.mm(cast(x, kinds["input"]), weight)

    @staticmethod
    def backward(ctx, gradient):
        (weight,) = ctx.saved_tensors
        gradient = cast(gradient, ctx.kinds["gradient"])
        weight = weight.to(gradient.dtype) if "repaired" in sys.argv else weight
        return torch.mm(gradient, weight.t()), None, None


weight = nn.Parameter(torch.ones(4, 4))
x = torch.ones(2, 4, requires_grad=True)
kinds = {"input": Cast.NARROW, "gradient": Cast.DISABLED}
with torch.autocast("cpu", dtype=torch.bfloat16):
    output = Product.apply(x, weight, kinds)
output.float().sum().backward()
