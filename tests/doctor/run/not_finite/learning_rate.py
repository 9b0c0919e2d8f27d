"""A learning rate that makes the weights grow at every step."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
rate = 1e-3 if "repaired" in sys.argv else 1e3
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
x = torch.randn(8, 6)
y = torch.randn(8, 1)
for _ in range(30):
    prediction = model(x)
    loss = (prediction - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
