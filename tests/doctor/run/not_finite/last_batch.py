"""The last batch has one row, whose standard deviation is not defined."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rewards = torch.randn(9)
for batch in rewards.split(4):
    correction = 0 if "repaired" in sys.argv else 1
    advantage = (batch - batch.mean()) / (batch.std(correction=correction) + 1e-8)
    loss = (model(torch.randn(len(batch), 3)).squeeze(1) * advantage).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
