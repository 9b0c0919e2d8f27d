"""Class weights in fp64, which NumPy returned, in the loss of an fp32 model."""

import sys

import torch
from torch import nn

repaired = "repaired" in sys.argv
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
counts = torch.tensor([7.0, 2.0, 1.0], dtype=torch.float64)
class_weights = counts.sum() / counts
if repaired:
    class_weights = class_weights.float()


def training_loss(logits, labels):
    criterion = nn.CrossEntropyLoss(weight=class_weights)
    return criterion(logits, labels)


training_loss(model(torch.randn(6, 4)), torch.tensor([0, 1, 2, 0, 1, 2])).backward()
