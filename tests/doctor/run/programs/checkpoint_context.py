"""A context manager sets the dtype of a checkpointed block in forward only."""

import sys
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Precision:
    dtype = torch.float32

    @contextmanager
    def low(self):
        previous, self.dtype = self.dtype, torch.bfloat16
        yield
        self.dtype = previous


class Block(nn.Module):
    def __init__(self, precision):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.precision = precision

    def forward(self, x):
        weight = self.layer.weight.to(self.precision.dtype)
        return (x.to(weight.dtype) @ weight).sigmoid()


precision = Precision()
block = Block(precision)
with precision.low():
    loss = checkpoint(block, torch.randn(2, 8), use_reentrant=False).float().sum()
    if "repaired" in sys.argv:
        loss.backward()
if "repaired" not in sys.argv:
    loss.backward()
