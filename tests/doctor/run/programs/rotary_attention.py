"""fp32 rotary tables promote query and key; the value stays bf16."""

import sys

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x, cos):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = q * cos
        k = k * cos
        if "repaired" in sys.argv:
            q, k = q.to(torch.bfloat16), k.to(torch.bfloat16)
        return F.scaled_dot_product_attention(q, k, v)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.inverse = 1.0 / 10000 ** (torch.arange(8) / 8)

    def forward(self, x):
        cos = torch.outer(torch.arange(5.0), self.inverse).cos()
        return self.attention(x, cos)


model = Model().to(torch.bfloat16)
model(torch.randn(2, 5, 8, dtype=torch.bfloat16)).float().sum().backward()
