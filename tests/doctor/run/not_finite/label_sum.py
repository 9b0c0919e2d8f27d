"""A sum of losses is divided by the number of labels, and a batch has no label."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
optimizer = torch.optim.AdamW(model.parameters())
batches = [torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[7, 8, 9], [1, 1, 2]])]
for step, ids in enumerate(batches):
    labels = ids.clone()
    labels[:, : 1 + 2 * step] = -100
    if "repaired" in sys.argv:
        labels[:, -1] = ids[:, -1]
    count = (labels != -100).sum()
    logits = model(ids).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    loss = loss / count.float()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
