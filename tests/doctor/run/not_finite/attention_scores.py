"""Queries and keys grow until their product leaves fp16."""

import sys

import torch
from torch import nn

REPAIRED = "repaired" in sys.argv


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, dim=-1)
        if REPAIRED:
            q = q * 16**-0.5 / 64
        scores = q @ k.transpose(-2, -1)
        return self.out(scores.softmax(-1) @ v)


torch.manual_seed(0)
model = Attention()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(4):
    x = torch.randn(2, 5, 16) * 30 * 4**step
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(x).float().tanh().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
