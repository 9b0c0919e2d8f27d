"""Autocast is opened for CUDA, and the model computes on the CPU."""

import sys

import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 4).to(torch.bfloat16), nn.Linear(4, 2))
device = "cpu" if "repaired" in sys.argv else "cuda"
with torch.autocast(device, dtype=torch.bfloat16):
    model(torch.randn(2, 4, dtype=torch.bfloat16))
