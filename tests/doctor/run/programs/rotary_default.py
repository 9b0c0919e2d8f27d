"""The default argument of a function casts queries and keys to fp32; the values stay bf16."""

import sys

import torch
import torch.nn.functional as F
from torch import nn


def rotate(queries, keys, table, dtype=torch.float32):
    queries, keys = queries.float() * table, keys.float() * table
    return queries.to(dtype), keys.to(dtype)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x, table):
        queries, keys, values = self.qkv(x).chunk(3, dim=-1)
        queries, keys = rotate(queries, keys, table)
        if "repaired" in sys.argv:
            queries, keys = queries.to(torch.bfloat16), keys.to(torch.bfloat16)
        return F.scaled_dot_product_attention(queries, keys, values)


layer = Attention().to(torch.bfloat16)
layer(torch.randn(1, 5, 8, dtype=torch.bfloat16), torch.arange(5.0)[:, None])
