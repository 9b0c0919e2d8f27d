"""An adapter of two layers is built at the first call, in fp32, after the cast of its model."""

import sys

import torch
from torch import nn


class Adapter(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down = nn.Linear(width, 2)
        self.up = nn.Linear(2, width)

    def forward(self, hidden):
        return hidden + self.up(self.down(hidden))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.adapter = None

    @torch.no_grad()
    def forward(self, hidden):
        if self.adapter is None:
            self.adapter = Adapter(8).requires_grad_(False)
            if "repaired" in sys.argv:
                self.adapter = Adapter(8).to(torch.bfloat16).requires_grad_(False)
        return self.adapter(self.layer(hidden))


encoder = Encoder().to(torch.bfloat16)
encoder(torch.randn(3, 8).bfloat16())
