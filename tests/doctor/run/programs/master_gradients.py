"""The bf16 gradients of a model are assigned to fp32 copies of its weights."""

import sys

import torch
from torch import nn

model = nn.Linear(4, 2).to(torch.bfloat16)
masters = [p.detach().float().requires_grad_() for p in model.parameters()]
model(torch.randn(3, 4, dtype=torch.bfloat16)).float().sum().backward()
for master, parameter in zip(masters, model.parameters(), strict=True):
    if "repaired" in sys.argv:
        master.grad = parameter.grad.to(master.dtype)
    else:
        master.grad = parameter.grad
