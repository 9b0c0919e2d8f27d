"""A distribution of torch compares its fp64 parameter with a constant in the default dtype."""

import sys

import torch
from torch import nn
from torch.distributions import GeneralizedPareto

if "repaired" in sys.argv:
    torch.set_default_dtype(torch.float64)


class Tail(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.shape = nn.Parameter(torch.full((), 0.1, dtype=torch.float64))

    def forward(self, excess):
        zero = torch.zeros_like(self.shape)
        return -GeneralizedPareto(zero, self.scale, self.shape).log_prob(excess).mean()


try:
    Tail()(torch.rand(8, dtype=torch.float64)).backward()
finally:
    torch.set_default_dtype(torch.float32)
