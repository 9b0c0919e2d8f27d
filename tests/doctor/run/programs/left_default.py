"""A loader returns before it restores the default dtype, so the next model is in bf16."""

import sys

import torch
from torch import nn


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 4)

    def forward(self, inputs):
        return self.inp(inputs)


class Loader:
    def __init__(self, dtype):
        self.dtype = dtype

    def load(self):
        previous = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        teacher = nn.Linear(4, 4)
        if "repaired" not in sys.argv:
            return teacher
        torch.set_default_dtype(previous)
        return teacher


rows = torch.randn(2, 4)
Loader(torch.bfloat16).load()
Student()(rows)
