"""A bf16 product with a weight that a method computes from fp32 parameters."""

import sys

import torch
from torch import nn
from torch.nn import functional as F


class Branch(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.left, self.right = nn.Parameter(torch.eye(2)), nn.Parameter(torch.ones(4, 4))

    def get_weight(self):
        return torch.kron(self.left, self.right)

    def forward(self, x):
        if "repaired" in sys.argv:
            return self.base(x) + F.linear(x, self.get_weight().to(torch.bfloat16))
        return self.base(x) + F.linear(x, self.get_weight())


base = nn.Linear(8, 8).to(torch.bfloat16)
Branch(base)(torch.randn(2, 8, dtype=torch.bfloat16))
