"""An orthogonal weight, which torch computes from a parameter, is cast to bf16 with its model."""

import sys

import torch
from torch import nn


class Projected(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.projection = nn.utils.parametrizations.orthogonal(nn.Linear(8, 2, bias=False))

    def forward(self, x):
        x = self.layer(x)
        if "repaired" in sys.argv:
            projected = self.projection(x.float()).to(torch.bfloat16)
            return projected @ self.projection.weight.to(torch.bfloat16)
        projected = self.projection(x)
        return projected @ self.projection.weight


model = Projected()
model.to(torch.bfloat16)
if "repaired" in sys.argv:
    model.projection.float()
model(torch.randn(3, 8).bfloat16())
