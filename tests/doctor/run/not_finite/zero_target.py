"""A count of 0 among the targets, whose logarithm is taken outside of the model."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    counts = torch.tensor([3.0, 5.0, 2.0 - step])
    if "repaired" in sys.argv:
        counts = counts.clamp(min=0.5)
    targets = counts.log()
    loss = (model(torch.randn(3, 4)).squeeze(-1) - targets).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
