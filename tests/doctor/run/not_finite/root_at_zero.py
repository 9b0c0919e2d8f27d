"""The distance of two equal embeddings: the derivative of a root at 0."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Embedding(5, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for left, right in (([0, 1], [2, 3]), ([0, 1], [4, 1])):
    difference = model(torch.tensor(left)) - model(torch.tensor(right))
    squared = difference.square().sum(-1)
    if "repaired" in sys.argv:
        squared = squared + 1e-12
    loss = squared.sqrt().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
