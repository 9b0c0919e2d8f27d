"""The norms of the first segment are fp32; `checkpoint_sequential` of torch runs the segments."""

import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential


class WideNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        normed = nn.functional.normalize(x.float(), dim=-1) * self.weight
        return normed.to(x.dtype) if "repaired" in sys.argv else normed


layers = nn.Sequential(
    nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16), WideNorm()),
    nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16), WideNorm()),
)
x = torch.randn(2, 8, dtype=torch.bfloat16, requires_grad=True)
checkpoint_sequential(layers, 2, x, use_reentrant=False).sum().backward()
