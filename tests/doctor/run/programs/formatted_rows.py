"""A dataset in the format torch makes fp32 tensors, and the model is bf16."""

import sys

import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader

rows = Dataset.from_dict({"x": [[0.5, 1.0], [1.0, 0.5]], "label": [0, 1]})
rows = rows.with_format("torch")
model = nn.Linear(2, 2).to(torch.bfloat16)
for batch in DataLoader(rows, batch_size=2):
    x = batch["x"]
    if "repaired" in sys.argv:
        x = x.to(torch.bfloat16)
    nn.functional.cross_entropy(model(x).float(), batch["label"]).backward()
