"""A validation between two steps casts the trained model to fp16, which the loss scaler refuses."""

import copy
import sys

import torch
from torch import nn


def validate(model):
    if "repaired" in sys.argv:
        model = copy.deepcopy(model)
    model.half()(torch.ones(1, 8, dtype=torch.float16))


model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
for _ in range(2):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.randn(2, 8)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    validate(model)
