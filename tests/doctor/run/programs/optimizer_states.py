"""The model is cast to bf16 after the first step; the states stay fp32."""

import sys

import torch
from torch import nn

model = nn.Linear(8, 8)
if "repaired" in sys.argv:
    model.to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
for step in range(2):
    if step == 1:
        model.to(torch.bfloat16)
    x = torch.randn(2, 8, dtype=model.weight.dtype)
    model(x).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
