"""A field of a configuration gives activations another dtype than the head."""

import sys
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Settings:
    width: int = 4
    compute_dtype: torch.dtype = torch.float32


class Encoder(nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.settings = settings

    def forward(self, x):
        return x.to(self.settings.compute_dtype) * 2


def build(width, head_dtype):
    settings = Settings(width=width)
    return nn.Sequential(Encoder(settings), nn.Linear(width, 2).to(head_dtype))


model = build(4, torch.float32 if "repaired" in sys.argv else torch.bfloat16)
model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
