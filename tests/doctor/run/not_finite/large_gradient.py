"""A sum over all values makes gradients that fp16 cannot hold, in the backward of an fp16 product."""

import sys

import torch
from torch import nn


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(300.0))

    def forward(self, x):
        return self.layer(x) * self.scale


torch.manual_seed(0)
model = Scorer()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
is_repaired = "repaired" in sys.argv
scaler = torch.amp.GradScaler("cpu", init_scale=1 / 8192, enabled=is_repaired)
for _ in range(2):
    with torch.autocast("cpu", dtype=torch.float16):
        output = model(torch.ones(64, 8))
    loss = output.float().square().sum() * 30
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
