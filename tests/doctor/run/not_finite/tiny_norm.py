"""Embeddings are normalised in fp16; one of them is tiny."""

import sys

import torch
from torch import nn

REPAIRED = "repaired" in sys.argv


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        hidden = self.linear(x)
        if REPAIRED:
            hidden = hidden.float()
        norm = hidden.pow(2).sum(-1, keepdim=True)
        return hidden / (norm + 1e-12)


torch.manual_seed(0)
model = Encoder()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for step in range(3):
    x = torch.randn(4, 8)
    if step == 2:
        x[1] *= 1e-5
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = (out.float() * 1e-3).tanh().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
