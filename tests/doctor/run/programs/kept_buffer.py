"""A buffer that is made once has the dtype of a setting, and the weights have another."""

import sys

import torch
from torch import nn

SETTINGS = {"width": 8, "dtype": torch.bfloat16 if "repaired" in sys.argv else torch.float16}
BUFFERS = {}


def get_buffer(rows, width, dtype):
    key = (rows, width, dtype)
    if key not in BUFFERS:
        BUFFERS[key] = torch.empty(rows, width, dtype=dtype)
    return BUFFERS[key]


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, dtype):
        out = get_buffer(x.shape[0], weight.shape[1], dtype)
        torch.matmul(x, weight, out=out)
        return out.clone()


class Project(nn.Module):
    def __init__(self, width, dtype=None):
        super().__init__()
        self.dtype = dtype or torch.float32
        self.weight = nn.Parameter(torch.randn(width, width, dtype=torch.bfloat16))

    def forward(self, x):
        return Product.apply(x, self.weight, self.dtype)


model = Project(SETTINGS["width"], SETTINGS["dtype"])
with torch.no_grad():
    model(torch.randn(2, 8, dtype=torch.bfloat16))
