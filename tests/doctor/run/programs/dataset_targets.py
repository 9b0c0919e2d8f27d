"""A dataset returns fp64 targets, and a loss that a function gets as its argument uses them."""

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Prices(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        target = torch.tensor(np.array([index / 4]))
        if "repaired" in sys.argv:
            target = target.float()
        return {"x": torch.full((6,), float(index)), "y": target}


def compute_loss(model, batch, criterion):
    return criterion(model(batch["x"]), batch["y"])


model = nn.Linear(6, 1)
for batch in DataLoader(Prices(), batch_size=2):
    loss = compute_loss(model, batch, nn.HuberLoss())
    loss.backward()
