"""The labels of a batch are cast to bf16 with its features."""

import sys

import torch
import torch.nn.functional as F
from torch import nn


def training_loss(model, batch):
    logits = model(batch["x"])
    labels = batch["labels"]
    if "repaired" in sys.argv:
        labels = labels.long()
    return F.cross_entropy(logits, labels)


model = nn.Linear(8, 4).to(torch.bfloat16)
batch = {"x": torch.randn(3, 8), "labels": torch.tensor([0, 1, 2])}
batch = {name: value.to(torch.bfloat16) for name, value in batch.items()}
training_loss(model, batch).backward()
