"""A cast of the whole transformer makes its trained layer fp16, and the loss scaler refuses."""

import sys

import torch
from torch import nn

transformer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
transformer[0].requires_grad_(False)
transformer.to(torch.float16)
if "repaired" in sys.argv:
    for p in transformer.parameters():
        p.data = p.data.float() if p.requires_grad else p.data
trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained)
scaler = torch.amp.GradScaler("cpu")
with torch.autocast("cpu", dtype=torch.float16):
    loss = transformer(torch.randn(2, 4)).sum()
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
