"""Adam without eps meets weights that never have a gradient."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
eps = 1e-8 if "repaired" in sys.argv else 0.0
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=eps)
ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
for _ in range(2):
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
