"""An optimizer keeps fp32 states for bf16 weights; a method that has returned loaded them, which
casts them to bf16.
"""

import sys

import torch
from torch import nn


class FullAverage(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["average"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["average"].lerp_(parameter.grad.float(), 0.1)
            parameter.sub_(state["average"], alpha=0.1)


class Checkpoint:
    def __init__(self, optimizer):
        self.states = optimizer.state_dict()

    def load(self, optimizer):
        optimizer.load_state_dict(self.states)
        if "repaired" in sys.argv:
            for index, parameter in enumerate(optimizer.param_groups[0]["params"]):
                optimizer.state[parameter].update(self.states["state"][index])


model = nn.Linear(4, 1).to(torch.bfloat16)


def train(optimizer):
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()


first = FullAverage(model.parameters())
train(first)
second = FullAverage(model.parameters())
Checkpoint(first).load(second)
train(second)
