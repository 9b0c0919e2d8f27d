"""The wrapper of an int4 kernel unpacks the weight in fp16, and the model is bf16."""

import sys

import torch
from torch import nn


def dot(left, right):
    assert left.dtype == right.dtype, f"got {left.dtype} and {right.dtype}"
    return left.float() @ right.float()


def multiply_int4(x, codes, scales):
    weight = codes.to(torch.float16) * scales.to(torch.float16)
    if "repaired" in sys.argv:
        weight = weight.to(torch.bfloat16)
    return dot(x, weight).to(x.dtype)


class Int4Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randint(0, 16, (8, 4), dtype=torch.uint8))
        self.register_buffer("scales", torch.rand(4))
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return multiply_int4(x, self.codes, self.scales) + self.bias


model = nn.Sequential(nn.Linear(8, 8), Int4Linear()).to(torch.bfloat16)
with torch.no_grad():
    model(torch.randn(2, 8, dtype=torch.bfloat16))
