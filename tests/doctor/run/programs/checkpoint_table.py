"""The first call of a checkpointed module makes an fp32 table; the second run reads it as bf16."""

import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.table = None

    def forward(self, x):
        if self.table is None:
            table = torch.linspace(0, 1, 8)
            self.table = table.to(x.dtype)
        else:
            table = self.table
        if "repaired" in sys.argv:
            table = table.to(x.dtype)
        return (self.layer(x) * table).sigmoid().to(x.dtype)


model = Scaled().to(torch.bfloat16)
x = torch.randn(2, 8, dtype=torch.bfloat16, requires_grad=True)
checkpoint(model, x, use_reentrant=False).sum().backward()
