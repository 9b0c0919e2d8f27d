"""A checkpointed function opens autocast by a flag that changes before backward."""

import sys

import torch
from torch.utils.checkpoint import checkpoint


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.outer = torch.nn.Linear(8, 8)
        self.is_warm = False

    def forward(self, x):
        is_on = "repaired" in sys.argv or not self.is_warm
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
            return self.outer(torch.relu(self.inner(x)))


block = Block()
x = torch.randn(2, 8, requires_grad=True)
loss = checkpoint(block, x, use_reentrant=False).float().sum()
block.is_warm = True
loss.backward()
