"""The logarithm of a softmax that has become 0."""

import sys

import torch
from torch import nn

REPAIRED = "repaired" in sys.argv
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
labels = torch.tensor([0, 1, 2, 3])
for step in range(4):
    logits = model(torch.randn(4, 6)) * 30.0**step
    if REPAIRED:
        log_probs = logits.log_softmax(-1)
    else:
        probs = logits.softmax(-1)
        log_probs = probs.log()
    loss = -log_probs.gather(1, labels[:, None]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
