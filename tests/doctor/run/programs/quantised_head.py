"""Logits are computed with the int8 codes of a quantised layer."""

import sys

import torch
from torch import nn


class Codes(nn.Parameter):
    pass


class QuantisedLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().max() / 127
        codes = (linear.weight.detach() / scale).round().to(torch.int8)
        self.weight = Codes(codes, requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) * self.scale.to(x.dtype)).t()


model = nn.Sequential(nn.Linear(4, 4), QuantisedLinear(nn.Linear(4, 6))).to(torch.bfloat16)
hidden = model[0](torch.randn(2, 4, dtype=torch.bfloat16))
if "repaired" in sys.argv:
    logits = model[1](hidden)
else:
    logits = torch.matmul(hidden, model[1].weight.t())
