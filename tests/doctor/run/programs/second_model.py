"""The averaged copy of an fp32 model is bf16, and gets fp32 noise."""

import copy
import sys

import torch
from torch import nn

trained = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
average = copy.deepcopy(trained).to(torch.bfloat16)


@torch.no_grad()
def sample(model):
    noise = torch.randn(2, 8)
    if "repaired" in sys.argv:
        noise = noise.to(torch.bfloat16)
    return model(noise)


trained(torch.randn(2, 8)).sum().backward()
sample(average)
