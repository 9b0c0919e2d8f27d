"""A checkpoint has an infinite weight."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 4))
state = model.state_dict()
if "repaired" not in sys.argv:
    state["1.weight"] = state["1.weight"].clone()
    state["1.weight"][3] = float("inf")
model.load_state_dict(state)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    loss = nn.functional.cross_entropy(model(torch.randn(5, 6)), torch.tensor([0, 1, 2, 3, 0]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
