"""The norms of a student are built in fp32; another line casts the norms of its teacher."""

import sys

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8, dtype=torch.bfloat16)

    def forward(self, x):
        hidden = self.norm(x.float())
        if "repaired" in sys.argv:
            hidden = hidden.to(torch.bfloat16)
        return self.linear(hidden)


def widen_norms(network):
    for parameter in network.parameters():
        if parameter.ndim == 1:
            parameter.data = parameter.data.float()


def train():
    student = Block()
    teacher = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).bfloat16()
    widen_norms(teacher)
    student(torch.randn(2, 8)).sum().backward()


train()
