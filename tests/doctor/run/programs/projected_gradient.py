"""An optimizer projects a bf16 gradient with an fp32 basis, its own state."""

import sys

import torch
from torch import nn


class Projected(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            basis = torch.linalg.qr(parameter.grad.float())[0]
            self.state[parameter]["basis"] = basis
            gradient = parameter.grad
            if "repaired" in sys.argv:
                basis = basis.to(torch.bfloat16)
            low = torch.mm(basis, gradient)
            parameter.add_(low, alpha=-0.1)


model = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
optimizer = Projected(model.parameters())
model(torch.randn(2, 8, dtype=torch.bfloat16)).sum().backward()
optimizer.step()
