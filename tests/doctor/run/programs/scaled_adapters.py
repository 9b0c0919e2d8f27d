"""The whole model is cast to fp16, also the adapters that a loss scaler trains."""

import sys

import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))
if "repaired" not in sys.argv:
    model.half()
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
scaler = torch.amp.GradScaler("cpu")
with torch.autocast("cpu", dtype=torch.float16):
    loss = model(torch.randn(2, 4)).float().sum()
scaler.scale(loss).backward()
scaler.step(optimizer)
