"""An attention that takes fp16 and bf16 only gets queries from a norm that computes in fp32."""

import sys

import torch
from torch import nn

SUPPORTED = {torch.float16, torch.bfloat16}


def fused_attention(q, k, v):
    if q.dtype not in SUPPORTED:
        raise TypeError(f"fused_attention does not support {q.dtype}")
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


class QueryNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return x.float() * scale * self.weight


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.norm = QueryNorm(width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if "all" in sys.argv:
            k, v = k.float(), v.float()
        if "mixed" in sys.argv:
            k = k.float()
        if "repaired" in sys.argv:
            return fused_attention(self.norm(q).to(torch.bfloat16), k, v)
        return fused_attention(self.norm(q), k, v)


model = Attention(8).to(torch.bfloat16)
model(torch.randn(2, 4, 8, dtype=torch.bfloat16))
