"""A router asserts fp32 logits, which autocast computed in bf16."""

import sys

import torch
from torch import nn


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)

    def forward(self, x):
        logits = self.gate(x)
        if "repaired" in sys.argv:
            logits = logits.to(torch.float32)
        assert logits.dtype == torch.float32, "router logits must be float32"
        return logits.softmax(-1)


with torch.autocast("cpu", dtype=torch.bfloat16):
    Router()(torch.randn(2, 8))
