"""The modules of an encoder share one dict. The pooling divides bf16 sums by integers that a float
bound made fp32, and the bf16 head reads the result from the dict.
"""

import sys

import torch
from torch import nn


class Pooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.mode = "mean"

    def forward(self, features):
        states, lengths = features["states"], features["lengths"]
        total = torch.zeros(len(lengths), 4, dtype=states.dtype).add(states.sum(1))
        divisor = torch.clamp(lengths.unsqueeze(1), min=1e-9)
        if "repaired" in sys.argv:
            divisor = divisor.to(total.dtype)
        if self.mode == "root":
            divisor = divisor.sqrt()
        if self.mode in ("mean", "root"):
            pooled = total / divisor
        else:
            pooled = states[:, 0]
        features["pooled"] = pooled
        return features


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, features):
        features["scores"] = self.linear(features["pooled"])
        return features


def make_features(rows):
    return {"states": torch.randn(rows, 3, 4).to(torch.bfloat16), "lengths": torch.full((rows,), 3)}


model = nn.Sequential(Pooling(), Head()).to(torch.bfloat16)
model(make_features(2))
