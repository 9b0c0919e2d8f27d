"""Features that are counts reach a linear layer as int64."""

import sys

import torch
from torch import nn

model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
counts = torch.tensor([[1, 0, 2], [0, 3, 1]])
if "repaired" in sys.argv:
    counts = counts.to(torch.float32)
model(counts)
