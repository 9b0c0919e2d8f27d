"""Rotary tables that are plain attributes stay fp32 when the model is cast."""

import sys

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        angles = torch.outer(torch.arange(6.0), torch.arange(8.0) / 8)
        self.cosine = angles.cos()
        self.projection = nn.Linear(8, 24)

    def rotate(self, x):
        if "repaired" in sys.argv:
            return x * self.cosine.to(x.dtype)
        return x * self.cosine

    def forward(self, x):
        q, k, v = self.projection(x).chunk(3, dim=-1)
        q, k = self.rotate(q), self.rotate(k)
        return F.scaled_dot_product_attention(q, k, v)


model = Attention().to(torch.bfloat16)
model(torch.randn(2, 6, 8, dtype=torch.bfloat16)).sum().backward()
