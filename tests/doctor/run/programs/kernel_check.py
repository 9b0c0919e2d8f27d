"""The forward of an autograd.Function checks that three tensors have one dtype."""

import sys

import torch
from torch import nn


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        assert x.dtype == cos.dtype == sin.dtype, f"got {x.dtype} and {cos.dtype}"
        ctx.save_for_backward(cos, sin)
        return x * cos + x.flip(-1) * sin

    @staticmethod
    def backward(ctx, gradient):
        cos, sin = ctx.saved_tensors
        return gradient * cos + (gradient * sin).flip(-1), None, None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.register_buffer("angles", torch.linspace(0, 1, 8))

    def forward(self, x):
        query = self.query(x)
        wide = query if "repaired" in sys.argv else query.float()
        return Rotate.apply(wide, self.angles.cos(), self.angles.sin()).to(x.dtype)


Attention().bfloat16()(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
