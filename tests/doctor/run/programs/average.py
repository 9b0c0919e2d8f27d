"""An fp32 average of bf16 weights."""

import sys

import torch
from torch import nn


class Average:
    def __init__(self, model):
        self.shadow = [parameter.detach().float() for parameter in model.parameters()]

    @torch.no_grad()
    def update(self, model):
        weights = list(model.parameters())
        if "repaired" in sys.argv:
            weights = [tensor.to(torch.float32) for tensor in weights]
        torch._foreach_lerp_(self.shadow, weights, 0.01)


model = nn.Linear(8, 8).to(torch.bfloat16)
Average(model).update(model)
