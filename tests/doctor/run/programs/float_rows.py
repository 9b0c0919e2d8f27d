"""A DataLoader makes fp64 tensors of the floats of Python in a list of rows."""

import sys

from torch import nn
from torch.utils.data import DataLoader

rows = [(index / 4, index % 2) for index in range(4)]


def train(model, loader):
    for values, labels in loader:
        if "repaired" in sys.argv:
            values = values.float()
        nn.functional.cross_entropy(model(values[:, None]), labels).backward()


loader = DataLoader(rows, batch_size=2)
train(nn.Linear(1, 2), loader)
