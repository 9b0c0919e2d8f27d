"""A function of another file casts the norms of a bf16 model to fp32, and has returned."""

import sys

import torch
from tests.doctor.run.model_preparation import keep_norms_wide
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.proj = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        return x + self.proj(self.norm(x.to(self.norm.weight.dtype)))


model = nn.Sequential(*[Block() for _ in range(2)]).to(torch.bfloat16)
if "repaired" not in sys.argv:
    keep_norms_wide(model)
model(torch.randn(2, 16).to(torch.bfloat16)).sum().backward()
