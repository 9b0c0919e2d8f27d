"""A forward pre-hook casts the input of one layer to fp32."""

import sys

import torch
from torch import nn


def steady_input(module, args):
    if "repaired" in sys.argv:
        return args
    return tuple(value.float() for value in args)


model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)).to(torch.bfloat16)
model[2].register_forward_pre_hook(steady_input)
model(torch.randn(4, 8, dtype=torch.bfloat16)).sum().backward()
