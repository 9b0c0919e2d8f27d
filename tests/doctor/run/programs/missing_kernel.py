"""A decomposition that exists for fp32 and fp64 only."""

import sys

import torch
from torch import nn


def orthogonal_start(layer):
    weight = layer.weight.detach()
    if "repaired" in sys.argv:
        q, _ = torch.linalg.qr(weight.float())
        q = q.to(torch.bfloat16)
    else:
        q, _ = torch.linalg.qr(weight)
    layer.weight.data.copy_(q)


orthogonal_start(nn.Linear(8, 8).to(torch.bfloat16))
