"""The angle of two equal vectors: the derivative of acos at 1."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 4, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
limit = 1 - 1e-6 if "repaired" in sys.argv else 1.0
for step in range(3):
    left = model(torch.randn(3, 4))
    right = left.detach().clone() if step == 2 else torch.randn(3, 4)
    cosine = nn.functional.cosine_similarity(left, right)
    cosine = torch.minimum(cosine, torch.tensor(limit))
    angle = torch.acos(cosine)
    loss = angle.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
