"""The experts' outputs are computed in the call that adds them into an fp32 buffer."""

import sys

import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x, choice, weights):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().flatten()
            if "repaired" in sys.argv:
                out.index_add_(0, rows, (expert(x[rows]) * weights[rows]).to(out.dtype))
            else:
                out.index_add_(0, rows, expert(x[rows]) * weights[rows])
        return out


with torch.autocast("cpu", dtype=torch.bfloat16):
    weights = torch.ones(4, 1, dtype=torch.bfloat16)
    Experts()(torch.randn(4, 8), torch.tensor([0, 1, 0, 1]), weights).sum().backward()
