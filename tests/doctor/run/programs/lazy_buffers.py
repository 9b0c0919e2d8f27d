"""A module with buffers is built at the first call, in fp32, after the cast of its model to bf16."""

import sys

import torch
from torch import nn


class Filters(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("bank", torch.hann_window(size)[None] * torch.rand(4, size))

    def forward(self, wave):
        return nn.functional.linear(wave, self.bank)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.filters = None

    def forward(self, wave):
        if self.filters is None:
            self.filters = Filters(size=16)
            if "repaired" in sys.argv:
                self.filters = Filters(size=16).to(torch.bfloat16)
        return self.layer(self.filters(wave))


encoder = Encoder().to(torch.bfloat16)
encoder(torch.randn(3, 16).bfloat16())
