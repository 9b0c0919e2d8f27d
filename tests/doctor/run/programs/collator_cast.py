"""A collator casts the features to fp16, and the model is bf16."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader


class Collator:
    def __init__(self, dtype):
        self.dtype = dtype

    def __call__(self, rows):
        features = torch.stack([row[0] for row in rows])
        return features.to(self.dtype), torch.tensor([row[1] for row in rows])


dtype = torch.bfloat16 if "repaired" in sys.argv else torch.float16
rows = [(torch.randn(6), index % 2) for index in range(8)]
loader = DataLoader(rows, batch_size=4, collate_fn=Collator(dtype))
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).to(torch.bfloat16)
for _, (features, labels) in enumerate(loader):
    nn.functional.cross_entropy(model(features), labels).backward()
