"""A loss is averaged over the selected tokens, and one batch has none."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    losses = model(torch.randn(4, 3)).squeeze(1).square()
    mask = torch.arange(4) < 2 - step
    selected = losses[mask]
    if "repaired" in sys.argv:
        loss = selected.sum() / max(len(selected), 1)
    else:
        loss = selected.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
