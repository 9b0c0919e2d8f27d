"""A hook adds an fp32 vector to the output of the first layer, and the second layer fails. Another
hook computes a norm in fp32 and does not change the output.
"""

import sys

import torch
from torch import nn

dtype = torch.bfloat16 if "repaired" in sys.argv else torch.float32
vector = torch.ones(8, dtype=dtype) / 8


def make_hook(strength):
    def add_vector(module, args, output):
        return output + strength * vector

    return add_vector


def record_norm(module, args, output):
    norms.append(output.float().norm())
    return output


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


norms = []
model = Model().to(torch.bfloat16)
model.layers[0].register_forward_hook(make_hook(2.0))
model.layers[0].register_forward_hook(record_norm)
model(torch.randn(2, 8, dtype=torch.bfloat16)).sum().backward()
