"""A metric converts the predictions of a bf16 model to NumPy."""

import sys

import torch
from torch import nn


def accuracy(logits, labels):
    if "repaired" in sys.argv:
        logits = logits.float()
    scores = logits.amax(-1)
    predictions = logits.numpy().argmax(-1)
    scores = scores.cpu().numpy()
    return (predictions == labels.numpy()).mean(), scores.mean()


model = nn.Linear(8, 4).to(torch.bfloat16)
with torch.no_grad():
    accuracy(model(torch.randn(3, 8, dtype=torch.bfloat16)), torch.tensor([0, 1, 2]))
