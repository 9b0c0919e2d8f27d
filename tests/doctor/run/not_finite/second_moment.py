"""A variance in bf16, as a difference of two moments, becomes negative."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
dtype = torch.float32 if "repaired" in sys.argv else torch.bfloat16
model = nn.Linear(8, 4).to(dtype)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, alpha=0.5, centered=True)
x = torch.randn(16, 8, dtype=dtype)
y = torch.randn(16, 4, dtype=dtype)
for _ in range(200):
    loss = nn.functional.mse_loss(model(x).float(), y.float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
