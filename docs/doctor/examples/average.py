"""A correct training of fp32 weights whose moving average is kept in bf16 and never changes. No error is raised."""

import torch
from torch import nn


def run():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    average = [p.detach().bfloat16() for p in model.parameters()]
    for _ in range(20):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(8, 16)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for mean, p in zip(average, model.parameters(), strict=True):
            mean.lerp_(p.detach().bfloat16(), 0.001)
