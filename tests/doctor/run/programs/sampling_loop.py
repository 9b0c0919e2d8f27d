"""The first step of a sampling loop leaves fp32 latents for the second one."""

import sys

import torch
from torch import nn

model = nn.Conv2d(2, 2, 3, padding=1).to(torch.bfloat16)
latents = torch.randn(1, 2, 4, 4, dtype=torch.bfloat16)
for _ in range(2):
    scaled = latents / 2
    if "repaired" in sys.argv:
        scaled = scaled.to(torch.bfloat16)
    noise = model(scaled)
    latents = latents - 0.1 * noise.float()
