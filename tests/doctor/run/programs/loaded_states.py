"""The states of an optimizer are stored in bf16 and put back without a cast."""

import sys

import torch
from torch import nn

model = nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for parameter in model.parameters():
    average = torch.zeros_like(parameter, dtype=torch.bfloat16)
    state = {"step": torch.tensor(1.0), "exp_avg": average, "exp_avg_sq": average.clone()}
    optimizer.state[parameter] = state
if "repaired" in sys.argv:
    optimizer.load_state_dict(optimizer.state_dict())
model(torch.randn(2, 4)).sum().backward()
optimizer.step()
