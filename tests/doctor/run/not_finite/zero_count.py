"""Gradients are divided by a count that is 0, between backward and step."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    loss = model(torch.randn(3, 4)).sum()
    optimizer.zero_grad()
    loss.backward()
    count = torch.tensor(2.0 - step)
    if "repaired" in sys.argv:
        count = count.clamp(min=1)
    for parameter in model.parameters():
        parameter.grad.div_(count)
    optimizer.step()
