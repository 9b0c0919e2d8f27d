"""A TensorDataset holds the float64 array of NumPy."""

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

features = np.random.default_rng(0).random((8, 5))
rows = TensorDataset(torch.from_numpy(features), torch.arange(8) % 2)
loader = DataLoader(rows, batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
for _number, (x, labels) in enumerate(loader):
    if "repaired" in sys.argv:
        x = x.to(torch.float32)
    nn.functional.cross_entropy(model(x), labels).backward()
