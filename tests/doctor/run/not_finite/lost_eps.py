"""Advantages without a gradient divide by a deviation plus 1e-8, which is 0 in fp16."""

import sys

import torch
from torch import nn


def advantages(rewards):
    if "repaired" in sys.argv:
        rewards = rewards.float()
    return (rewards - rewards.mean()) / (rewards.std() + 1e-8)


torch.manual_seed(0)
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for rewards in (torch.tensor([0.0, 1.0, 0.5]), torch.ones(3)):
    weights = advantages(rewards.half())
    loss = -(weights.float() * model(torch.randn(3, 4)).sum(-1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
