"""Two sums in the default dtype, into which a model in fp64 adds its rows."""

import sys

import torch
from torch import nn

OPTIONS = {"dtype": torch.float64} if "repaired" in sys.argv else {}


class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x, groups, size):
        rows = self.proj(x)
        if OPTIONS:
            total, count = torch.zeros(size, 4, **OPTIONS), torch.zeros(size, **OPTIONS)
        else:
            total = torch.zeros(size, 4)
            count = torch.zeros(size)
        total.index_add_(0, groups, rows)
        count.scatter_add_(0, groups, torch.ones_like(rows[:, 0]))
        return total / count[:, None]


model = Pool().double()
model(torch.ones(3, 4).double(), torch.tensor([0, 1, 1]), 2)
