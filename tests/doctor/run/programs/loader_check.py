"""A loader has its own check of dtypes and shapes; norms are built in the default dtype, bf16, and the
checkpoint has them in fp32.
"""

import sys

import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        dtype = torch.float32 if "repaired" in sys.argv else None
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))

    def forward(self, x):
        return (x.float() * self.weight.float()).to(x.dtype)


def read_checkpoint():
    width = 4 if "shape" in sys.argv else 8
    return {"0.weight": torch.randn(8, 8), "1.weight": torch.ones(width, dtype=torch.float32)}


def load(model, tensors):
    own = model.state_dict()
    for name, tensor in tensors.items():
        if own[name].dtype != tensor.dtype or own[name].shape != tensor.shape:
            raise RuntimeError(f"{name}: mismatched dtypes or shape")
        own[name].copy_(tensor)


default_dtype = torch.get_default_dtype()
tensors = read_checkpoint()
torch.set_default_dtype(torch.float32 if "shape" in sys.argv else torch.bfloat16)
tensors["0.weight"] = tensors["0.weight"].to(torch.get_default_dtype())
model = nn.Sequential(nn.Linear(8, 8, bias=False), Norm(8))
load(model, tensors)
torch.set_default_dtype(default_dtype)
