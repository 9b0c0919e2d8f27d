"""The loss is scaled, and the optimizer is called directly."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
scaler = torch.amp.GradScaler("cpu")
x = torch.randn(8, 6)
y = torch.randn(8, 1) * 100
for _ in range(3):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x).float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if "repaired" in sys.argv:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
