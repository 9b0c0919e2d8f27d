"""Integer labels in a loss that needs the dtype of its prediction."""

import sys

import torch
from torch import nn

model = nn.Linear(8, 1)
criterion = nn.BCEWithLogitsLoss()
x, labels = torch.randn(4, 8), torch.tensor([0, 1, 1, 0])
if "repaired" in sys.argv:
    labels = labels.to(torch.float32)
loss = criterion(model(x).squeeze(1), labels)
loss.backward()
