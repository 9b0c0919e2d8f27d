"""A hook of a layer multiplies its bf16 output by an fp32 matrix."""

import sys

import torch
from torch import nn

dtype = torch.bfloat16 if "repaired" in sys.argv else torch.float32
steering = torch.eye(8, dtype=dtype)


def steer(module, args, output):
    return output @ steering


model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).to(torch.bfloat16)
handle = model[0].register_forward_hook(steer)
model(torch.randn(4, 8, dtype=torch.bfloat16)).sum().backward()
