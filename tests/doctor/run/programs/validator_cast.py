"""A validator casts the model that is trained to the dtype that it holds."""

import copy
import sys

import torch
from torch import nn


class Validator:
    def __init__(self, dtype):
        self.dtype = dtype

    def __call__(self, model, x):
        if "repaired" in sys.argv:
            model = copy.deepcopy(model)
        return model.to(self.dtype)(x.to(self.dtype)).sum()


model = nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
validate = Validator(torch.bfloat16)
x = torch.randn(3, 4)
for _ in range(2):
    model(x.to(model.weight.dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    validate(model, x)
