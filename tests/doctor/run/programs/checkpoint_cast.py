"""A function that logs a sample casts the model between forward and a checkpoint's second run."""

import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 2)

    def forward(self, x):
        return self.second(checkpoint(self.first, x, use_reentrant=False))


def log_sample(model, x):
    if "repaired" in sys.argv:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)
    model.bfloat16()
    return model(x.bfloat16())


model = Model()
x = torch.randn(4, 8, requires_grad=True)
loss = model(x).square().mean()
log_sample(model, x.detach())
loss.backward()
