"""A mean over the labels that are not masked, in a batch whose labels are all masked."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(3, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    labels = torch.full((2,), -100) if step == 1 else torch.tensor([1, 2])
    used = labels != -100
    scores = model(torch.randn(2, 3)).log_softmax(-1)
    losses = -scores.gather(1, labels.clamp(min=0)[:, None])[:, 0] * used
    count = used.sum().clamp(min=1) if "repaired" in sys.argv else used.sum()
    loss = losses.sum() / count
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
