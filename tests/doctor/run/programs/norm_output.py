"""A norm that stays fp32 hands its output to a bf16 linear layer."""

import sys

import torch
from torch import nn

IS_REPAIRED = "repaired" in sys.argv


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.proj = nn.Linear(16, 16)

    def forward(self, x):
        hidden = self.norm(x.float())
        if IS_REPAIRED:
            hidden = hidden.to(torch.bfloat16)
        return self.proj(hidden)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


model = Model().to(torch.bfloat16)
for block in model.blocks:
    block.norm.float()
model(torch.arange(4)).float().sum().backward()
