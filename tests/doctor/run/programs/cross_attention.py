"""A text encoder casts its output to the dtype of its class; cross attention of a bf16 model reads it."""

import sys

import torch
from torch import nn


class TextEncoder(nn.Module):
    compute_dtype = torch.float16

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, words):
        return self.proj(words).to(self.compute_dtype)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.text = TextEncoder()
        self.cross = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, words):
        context = self.text(words)
        if "repaired" in sys.argv:
            context = context.to(torch.bfloat16)
        return self.cross(x, context, context)[0]


model = Model().to(torch.bfloat16)
model(torch.randn(1, 3, 8).to(torch.bfloat16), torch.randn(1, 4, 8).to(torch.bfloat16))
