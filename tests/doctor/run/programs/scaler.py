"""A loss scaler over a model whose weights are fp16."""

import sys

import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).half()
if "repaired" in sys.argv:
    model.float()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
with torch.autocast("cpu", dtype=torch.float16):
    loss = model(torch.randn(2, 8)).square().mean()
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
