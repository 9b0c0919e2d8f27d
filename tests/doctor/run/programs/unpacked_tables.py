"""The fp64 tables of a rotary embedding are unpacked from an attribute, in compiled code."""

import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def make_tables(length, width):
    angles = np.outer(np.arange(length), np.arange(width))
    return torch.from_numpy(np.cos(angles)), torch.from_numpy(np.sin(angles))


def rotate(x, cosine, sine):
    return x * cosine + x.flip(-1) * sine


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = make_tables(4, 8)

    def forward(self, x):
        cosine, sine = self.tables
        q, k = rotate(x, cosine, sine), rotate(x, cosine, sine)
        if "repaired" in sys.argv:
            q, k = q.to(torch.bfloat16), k.to(torch.bfloat16)
        return F.scaled_dot_product_attention(q, k, x)


model = torch.compile(Model(), backend="eager")
model(torch.randn(1, 4, 8, dtype=torch.bfloat16))
