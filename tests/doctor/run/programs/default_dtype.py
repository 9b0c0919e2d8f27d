"""A checkpointed function creates a table in the default dtype, which backward does not set."""

import sys

import torch
from torch.utils.checkpoint import checkpoint

repaired = "repaired" in sys.argv


def add_positions(x):
    table = torch.linspace(0, 1, 4)
    if repaired:
        table = table.to(x.dtype)
    return (x.sigmoid() * table).exp()


x = torch.randn(2, 4, dtype=torch.bfloat16, requires_grad=True)
torch.set_default_dtype(torch.bfloat16)
try:
    loss = checkpoint(add_positions, x, use_reentrant=False).float().sum()
finally:
    torch.set_default_dtype(torch.float32)
loss.backward()
