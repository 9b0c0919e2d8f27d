"""An engine casts the model to bf16 after the average of its weights was built in fp32."""

import copy
import sys

import torch
from torch import nn


class Engine:
    def __init__(self, module):
        self.module = module
        self.module.bfloat16()


class Average:
    def __init__(self, model):
        self.model = copy.deepcopy(model)

    @torch.no_grad()
    def update(self, model):
        pairs = zip(self.model.parameters(), model.parameters(), strict=True)
        for average, current in pairs:
            if "repaired" in sys.argv:
                current = current.to(average.dtype)
            average.data.lerp_(current.data, 0.1)


model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
average = Average(model)
engine = Engine(model)
average.update(engine.module)
