"""A DataLoader reads a list of rows that a function filled with fp64 tensors."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader


def make_rows(count):
    rows = []
    for index in range(count):
        features = torch.full((8,), index / 4).double()
        if "repaired" in sys.argv:
            features = features.to(torch.float32)
        rows.append({"features": features, "label": index % 2})
    return rows


model = nn.Linear(8, 2)
for batch in DataLoader(make_rows(4), batch_size=2):
    nn.functional.cross_entropy(model(batch["features"]), batch["label"]).backward()
