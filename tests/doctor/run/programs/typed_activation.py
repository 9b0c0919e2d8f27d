"""A class of the program builds its weights in fp16, and a loss scaler gets their gradients."""

import sys

import torch
from torch import nn

DTYPE = torch.float32 if "repaired" in sys.argv else torch.float16


class Activation(nn.PReLU):
    def __init__(self, channels):
        super().__init__(channels, dtype=DTYPE)


model = nn.Sequential(nn.Linear(8, 8), Activation(8), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
with torch.autocast("cpu", dtype=torch.float16):
    loss = model(torch.ones(4, 8)).float().square().mean()
scaler.scale(loss).backward()
scaler.step(optimizer)
