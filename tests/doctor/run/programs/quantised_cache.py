"""A quantised layer computes in its own precision. A bf16 cache refuses its results."""

import sys

import torch
from torch import nn


class Int8Linear(nn.Module):
    def __init__(self, linear, precision=torch.float32):
        super().__init__()
        self.precision = precision
        self.register_buffer("codes", linear.weight.round().to(torch.int8))

    def forward(self, x):
        return nn.functional.linear(x.to(self.precision), self.codes.to(self.precision))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.register_buffer("keys", torch.zeros(4, 8, dtype=torch.bfloat16))
        self.register_buffer("values", torch.zeros(4, 8, dtype=torch.bfloat16))

    def write(self, positions, keys, values):
        self.keys[positions] = keys
        self.values[positions] = values

    def forward(self, x, positions):
        self.write(positions, self.key(x), self.key(x))
        return self.head(self.keys + self.values)


model = Attention().to(torch.bfloat16)
model.key = Int8Linear(nn.Linear(8, 8))
if "repaired" in sys.argv:
    model.key.precision = torch.bfloat16
with torch.no_grad():
    model(torch.randn(2, 8, dtype=torch.bfloat16), torch.arange(2))
