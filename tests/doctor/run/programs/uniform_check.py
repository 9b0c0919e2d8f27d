"""A library's norm of all gradients needs one dtype, and one parameter is built in fp32."""

import sys

import torch
from torch import nn


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8, dtype=torch.bfloat16)
        dtype = torch.bfloat16 if "repaired" in sys.argv else torch.float32
        self.decay = nn.Parameter(torch.log(torch.arange(1, 9, dtype=dtype)))

    def forward(self, x):
        return self.project(x) * self.decay.exp().to(x.dtype)


def total_norm(parameters):
    gradients = [parameter.grad for parameter in parameters]
    if len({gradient.dtype for gradient in gradients}) > 1:
        raise ValueError("expected a uniform dtype of all gradients")
    return torch.stack([gradient.norm() for gradient in gradients]).norm()


model = Mixer()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(2, 8, dtype=torch.bfloat16)).sum().backward()
total_norm(model.parameters())
optimizer.step()
