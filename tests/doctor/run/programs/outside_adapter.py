"""An image adapter outside of an fp16 model is never cast, so its keys and values are fp32."""

import sys

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q = nn.Linear(8, 8)
        self.patches = []

    def forward(self, x):
        q = self.to_q(x)
        return sum((patch(q) for patch in self.patches), q)


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = nn.Linear(8, 8, bias=False)
        self.v = nn.Linear(8, 8, bias=False)


class Patch:
    def __init__(self, adapter, tokens):
        self.adapter, self.tokens = adapter, tokens

    def __call__(self, q):
        k, v = self.adapter.k(self.tokens), self.adapter.v(self.tokens)
        if "repaired" in sys.argv:
            k, v = k.to(torch.float16), v.to(torch.float16)
        return F.scaled_dot_product_attention(q, k, v)


model = Attention().half()
image = torch.randn(1, 3, 8).half()
model.patches.append(Patch(Adapter(), image.float()))
model(torch.randn(1, 5, 8).half())
