"""A head runs with autocast switched off, and gets what an encoder computed under autocast."""

import sys

import torch
from torch import nn

ENABLED = "repaired" in sys.argv


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.encode(x)
        return self.decode(hidden)

    def encode(self, x):
        return self.encoder(x)

    def decode(self, hidden):
        with torch.autocast("cpu", enabled=ENABLED):
            return self.head(hidden)


model = Model()
with torch.autocast("cpu", dtype=torch.bfloat16):
    loss = model(torch.randn(2, 5, 8)).square().mean()
loss.backward()
