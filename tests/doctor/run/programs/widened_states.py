"""A bf16 run resumes: the loader puts every state of the optimizer back in fp32, and the step, which
creates states in the dtype of the parameter, writes a bf16 gradient into one.
"""

import sys

import torch
from torch import nn


class Momentum(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"momentum": 0.9})

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        restore_states(self, state_dict)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "buffer" not in state:
                    state["buffer"] = torch.zeros_like(parameter)
                buffer = state["buffer"]
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                parameter.add_(buffer, alpha=-0.1)


def restore_states(optimizer, saved):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in enumerate(parameters):
        state = optimizer.state.get(parameter)
        for key, value in saved["state"][index].items():
            if "repaired" in sys.argv:
                state[key] = value.to(device=parameter.device)
            else:
                state[key] = value.to(device=parameter.device, dtype=torch.float32)


def train(optimizer):
    model(torch.randn(2, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()


model = nn.Linear(4, 4, dtype=torch.bfloat16)
first = Momentum(model.parameters())
train(first)
second = Momentum(model.parameters())
second.load_state_dict(first.state_dict())
train(second)
