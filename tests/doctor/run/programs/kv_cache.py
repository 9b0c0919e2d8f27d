"""A cache of keys is created in fp32 for a bf16 model."""

import sys

import torch
from torch import nn


class Cache(nn.Module):
    def __init__(self, length, width, dtype=torch.float32):
        super().__init__()
        self.register_buffer("keys", torch.zeros(length, width, dtype=dtype))

    def write(self, positions, keys):
        self.keys.index_copy_(0, positions, keys)
        return self.keys


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.key = nn.Linear(8, 8)

    def forward(self, x, positions):
        keys = self.cache.write(positions, self.key(x))
        return torch.softmax(x @ keys.T, -1) @ keys


model = Attention().to(torch.bfloat16)
model.cache = Cache(6, 8)
if "repaired" in sys.argv:
    model.cache.to(torch.bfloat16)
with torch.no_grad():
    model(torch.randn(2, 8, dtype=torch.bfloat16), torch.arange(2))
