"""A decorator passes all arguments of a layer's forward on, and the caller's input is fp32."""

import functools
import sys

import torch
from torch import nn


def count_calls(forward):
    @functools.wraps(forward)
    def counted(*args, **kwargs):
        counted.calls += 1
        return forward(*args, **kwargs)

    counted.calls = 0
    return counted


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)

    @count_calls
    def forward(self, hidden, scale):
        return self.proj(hidden) * scale


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, ids):
        positions = torch.linspace(0, 1, 4) + ids[:, None]
        if "repaired" in sys.argv:
            positions = positions.to(torch.bfloat16)
        return self.block(positions, scale=2)


Model().bfloat16()(torch.tensor([0, 1])).sum().backward()
