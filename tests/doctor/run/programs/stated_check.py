"""A kernel of another file wants fp32 logits and says so; the model returns bf16."""

import sys
from types import SimpleNamespace

import torch
from torch import nn


def mask_logits(logits, allowed):
    if logits.dtype != torch.float32:
        raise ValueError("logits must be of type float32")
    return logits.masked_fill(~allowed, float("-inf"))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return SimpleNamespace(logits=self.head(x))


model = Model().to(torch.bfloat16)
scores = model(torch.ones(2, 8, dtype=torch.bfloat16)).logits
if "repaired" in sys.argv:
    scores = scores.to(torch.float32)
mask_logits(scores, torch.tensor([True, False, True, False]))
