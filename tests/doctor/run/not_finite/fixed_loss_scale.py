"""The program multiplies the loss by a fixed scale, and a gradient in fp16 overflows."""

import sys

import torch
from torch import nn

scale = 2.0**4 if "repaired" in sys.argv else 2.0**16
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).half()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for _ in range(2):
    x = torch.full((4, 8), 40.0).half()
    loss = model(x).float().square().mean()
    optimizer.zero_grad()
    (loss * scale).backward()
    optimizer.step()
