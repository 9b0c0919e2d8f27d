"""The first layer of a bf16 model is a norm. On a CPU, autocast does not cast the input of a norm."""

import sys

import torch
from torch import nn

model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4)).to(torch.bfloat16)
pixels = torch.rand(2, 8)
if "repaired" in sys.argv:
    pixels = pixels.to(torch.bfloat16)
with torch.autocast("cpu", dtype=torch.bfloat16):
    model(pixels)
