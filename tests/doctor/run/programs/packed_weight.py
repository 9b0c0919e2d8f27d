"""All parameters of a block are unfrozen, packed weights with 8-bit codes too."""

import sys

import torch
from torch import nn

repaired = "repaired" in sys.argv


class PackedWeight(nn.Parameter):
    pass


class PackedLinear(nn.Module):
    def __init__(self):
        super().__init__()
        codes = torch.zeros(8, 1, dtype=torch.uint8)
        self.weight = PackedWeight(codes, requires_grad=False)
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)


model = nn.Sequential(nn.Linear(4, 4), PackedLinear())
for parameter in model.parameters():
    if parameter.is_floating_point() or not repaired:
        parameter.requires_grad_(True)
