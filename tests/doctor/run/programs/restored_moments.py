"""An optimizer keeps fp32 states for bf16 weights, and `load_state_dict` casts them to bf16."""

import sys

import torch
from torch import nn


class Momentum(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p, dtype=torch.float32)
                state["average"].lerp_(p.grad.float(), 0.1)
                p.add_(state["average"].to(p.dtype), alpha=-0.1)


def train(model, optimizer):
    model(torch.randn(2, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()


def build():
    model = nn.Linear(4, 4).to(torch.bfloat16)
    return model, Momentum(model.parameters(), {"lr": 0.1})


first = build()
train(*first)
saved = first[1].state_dict()
model, optimizer = build()
optimizer.load_state_dict(saved)
if "repaired" in sys.argv:
    for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        optimizer.state[p].update(saved["state"].get(i, {}))
    assert all(state["average"].dtype == torch.float32 for state in optimizer.state.values())
train(model, optimizer)
