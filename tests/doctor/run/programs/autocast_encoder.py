"""A module runs its layers under autocast in its own forward; attention outside of it follows."""

import sys

import torch
import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.layers(x)
        return hidden.unsqueeze(1)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.query = nn.Linear(8, 8)

    def forward(self, x):
        memory = self.encoder(x)
        if "repaired" in sys.argv:
            memory = memory.float()
        query = self.query(x).unsqueeze(1)
        return F.scaled_dot_product_attention(query, memory, memory)


Reader()(torch.randn(2, 4, 8))
