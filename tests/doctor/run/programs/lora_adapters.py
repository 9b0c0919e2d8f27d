"""fp32 adapters on a bf16 base, called without autocast."""

import contextlib
import sys

import torch
from torch import nn


class LoraLinear(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(base.in_features, 4, bias=False)
        self.lora_B = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x))


trunk = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(torch.bfloat16).requires_grad_(False)
model = nn.Sequential(trunk[0], LoraLinear(trunk[1]))
optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
region = contextlib.nullcontext()
if "repaired" in sys.argv:
    region = torch.autocast("cpu", dtype=torch.bfloat16)
x = torch.randn(2, 64, dtype=torch.bfloat16)
with region:
    loss = model(x).float().square().mean()
loss.backward()
optimizer.step()
