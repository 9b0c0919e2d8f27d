"""An optimizer takes bf16 parameters only, and its check has no message."""

import sys

import torch
from torch import nn


class HalfSGD(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            assert parameter.dtype == torch.bfloat16
            parameter.sub_(parameter.grad)


def build_adapter():
    return nn.Linear(4, 2)


adapter = build_adapter()
if "repaired" in sys.argv:
    adapter.to(torch.bfloat16)
optimizer = HalfSGD(adapter.parameters())
adapter(torch.ones(1, 4, dtype=adapter.weight.dtype)).sum().backward()
optimizer.step()
