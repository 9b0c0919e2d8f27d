"""A library function that works in place uses an operator that has no bf16 kernel."""

import sys

import torch
from torch import nn

layer = nn.Linear(4, 4)
if "repaired" not in sys.argv:
    layer = layer.to(torch.bfloat16)
nn.init.orthogonal_(layer.weight)
