"""A position table in fp32 widens the residual stream of a bf16 model, whose norms need bf16."""

import sys

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first_norm = nn.LayerNorm(8)
        self.mixer = nn.Linear(8, 8)
        self.second_norm = nn.LayerNorm(8)
        self.feed_forward = nn.Linear(8, 8)

    def forward(self, x):
        x = x + self.mixer(self.first_norm(x))
        return x + self.feed_forward(self.second_norm(x))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.positions = nn.Embedding(3, 8)
        self.layer = Layer()

    def forward(self, features):
        positions = self.positions.weight
        if "repaired" in sys.argv:
            positions = positions.to(torch.bfloat16)
        return self.layer(self.embed(features) + positions)


model = Encoder().to(torch.bfloat16)
model.positions.float()
with torch.no_grad():
    model(torch.ones(2, 3, 4, dtype=torch.bfloat16))
