"""Autocast computes a parametrization in bf16, and PyTorch checks that it keeps the weight's dtype."""

import sys

import torch
from torch import nn
from torch.nn.utils import parametrize


class AddProduct(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Parameter(torch.zeros(4, 2))
        self.right = nn.Parameter(torch.zeros(2, 4))

    def forward(self, weight):
        change = torch.addmm(weight, self.left, self.right)
        return change.to(weight.dtype) if "repaired" in sys.argv else change


layer = nn.Linear(4, 4)
with torch.autocast("cpu", dtype=torch.bfloat16):
    parametrize.register_parametrization(layer, "weight", AddProduct())
