"""The token ids of a batch are cast to bf16 with the rest."""

import sys

import torch
from torch import nn

model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 2)).to(torch.bfloat16)
batch = {"input_ids": torch.arange(4), "weights": torch.rand(4)}
if "repaired" in sys.argv:
    batch = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in batch.items()}
else:
    batch = {k: v.to(torch.bfloat16) for k, v in batch.items()}
model(batch["input_ids"]).float().sum().backward()
