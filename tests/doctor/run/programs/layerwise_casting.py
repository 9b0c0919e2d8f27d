"""Layers are stored in fp8 and cast to bf16 while they run; an adapter casts its input to the dtype
of its weight before that.
"""

import sys

import torch
from torch import nn


class Casting:
    def __init__(self, storage, compute):
        self.storage, self.compute = storage, compute

    def before(self, module, args):
        module.to(self.compute)
        if "repaired" in sys.argv:
            return tuple(value.to(torch.bfloat16) for value in args)
        return None

    def after(self, module, args, output):
        module.to(self.storage)


def store(model, storage, compute):
    casting = Casting(storage, compute)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.to(storage)
            module.register_forward_pre_hook(casting.before)
            module.register_forward_hook(casting.after)
    return model


class Adapter(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.down, self.up = nn.Linear(size, 2, bias=False), nn.Linear(2, size, bias=False)

    def forward(self, x):
        x = x.to(self.down.weight.dtype)
        return self.up(self.down(x))


model = nn.Sequential(nn.Linear(8, 8), Adapter(8), nn.Linear(8, 2))
store(model, torch.float8_e4m3fn, torch.bfloat16)
with torch.no_grad():
    model(torch.ones(2, 8, dtype=torch.bfloat16))
