"""A weight of 100,000 becomes inf when the model is cast to fp16."""

import sys

import torch
from torch import nn


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([1.0, 1e5]))

    def forward(self, x):
        return x * self.gain / self.gain.max()


model = Gate()
if "repaired" not in sys.argv:
    model.half()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loss = model(torch.ones(3, 2, dtype=model.gain.dtype)).float().square().mean()
loss.backward()
optimizer.step()
