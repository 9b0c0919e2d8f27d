"""The training step runs under autocast, and the evaluation in another method does not."""

import sys

import torch
from torch import nn


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.adapter = nn.Linear(8, 8)

    def forward(self, x):
        return self.base(x) + self.adapter(x)


class Loop:
    def __init__(self, model):
        self.model = model

    def train_step(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.model(x).float().square().mean()
        loss.backward()

    @torch.no_grad()
    def evaluate(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled="repaired" in sys.argv):
            return self.model(x).float().mean()


loop = Loop(Adapted())
x = torch.randn(2, 8, dtype=torch.bfloat16)
loop.train_step(x)
loop.evaluate(x)
