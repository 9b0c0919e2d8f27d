"""A check in a function of attention refuses a bias that was created in fp32 under autocast."""

import sys

import torch
from torch import nn


def compute_attention(query, key, value, bias):
    if bias.dtype != query.dtype:
        raise RuntimeError("invalid dtype for bias, it should be that of query")
    scores = query @ key.transpose(-1, -2) + bias
    return scores.softmax(-1).to(value.dtype) @ value


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_qkv = nn.Linear(8, 24)

    def forward(self, x, keep):
        query, key, value = self.to_qkv(x).chunk(3, -1)
        if "repaired" in sys.argv:
            bias = torch.zeros(keep.shape, dtype=torch.bfloat16)
        else:
            bias = torch.zeros(keep.shape)
        bias = bias.masked_fill(~keep, float("-inf"))
        return compute_attention(query, key, value, bias)


with torch.autocast("cpu", dtype=torch.bfloat16):
    Attention()(torch.ones(2, 4, 8), torch.ones(2, 4, 4).tril() > 0).sum().backward()
