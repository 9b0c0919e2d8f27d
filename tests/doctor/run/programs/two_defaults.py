"""Two calculators set the default dtype when they are built; the second one decides it for both."""

import sys

import torch
from torch import nn


def set_precision(dtype):
    torch.set_default_dtype(dtype)


class Calculator:
    def __init__(self, dtype):
        set_precision(dtype)
        self.dtype = dtype
        self.embedding = nn.Linear(4, 2).to(dtype)

    def compute(self, symbols):
        if "repaired" in sys.argv:
            set_precision(self.dtype)
        return self.embedding(encode(symbols))


def encode(symbols):
    return nn.functional.one_hot(symbols, 4).to(torch.get_default_dtype())


double = Calculator(torch.float64)
single = Calculator(torch.float32)
for calculator in (single, double):
    calculator.compute(torch.tensor([0, 3]))
set_precision(torch.float32)
