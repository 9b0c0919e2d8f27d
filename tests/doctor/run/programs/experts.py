"""The experts' outputs, which autocast makes bf16, are added into an fp32 buffer."""

import sys

import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x, choice):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().flatten()
            values = expert(x[rows])
            if "repaired" in sys.argv:
                values = values.to(out.dtype)
            out.index_add_(0, rows, values)
        return out


with torch.autocast("cpu", dtype=torch.bfloat16):
    Experts()(torch.randn(4, 8), torch.tensor([0, 1, 0, 1])).sum().backward()
