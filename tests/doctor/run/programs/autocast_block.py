"""The forward of a block is decorated with autocast, and an fp32 head outside of it follows."""

import sys

import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x, expert):
        return torch.bmm(x.unsqueeze(1), self.weight[expert]).squeeze(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = Experts()
        self.out = nn.Identity()

    @torch.autocast(device_type="cpu", dtype=torch.bfloat16)
    def forward(self, x, expert):
        return self.out(self.experts(x, expert))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(8, 2)

    def forward(self, x, expert):
        hidden = self.block(x, expert)
        if "repaired" in sys.argv:
            hidden = hidden.float()
        return self.head(hidden)


Model()(torch.randn(4, 8), torch.tensor([0, 1, 1, 0]))
