"""A forward hook runs an fp32 module outside of the model on the output of a bf16 layer."""

import sys

import torch
from torch import nn


class Rotation(nn.Module):
    def __init__(self):
        super().__init__()
        self.skew = nn.Parameter(torch.zeros(4, 4))

    def forward(self, hidden):
        rotation = torch.eye(4) + self.skew - self.skew.t()
        if "repaired" in sys.argv:
            rotation = rotation.to(hidden.dtype)
        return torch.einsum("nd,de->ne", hidden, rotation)


model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).to(torch.bfloat16)
outside = Rotation()
model[0].register_forward_hook(lambda module, args, output: outside(output))
model(torch.randn(2, 4, dtype=torch.bfloat16))
