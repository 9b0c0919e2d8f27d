"""An object keeps the fp32 table and a request the fp32 tensor that their constructors got."""

import sys
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Request:
    prompt: torch.Tensor
    steps: int = 2


class Guide:
    def __init__(self, table, scale):
        self.table = table
        self.scale = scale

    def apply(self, model, x):
        shifted = x * self.scale + self.table
        if "repaired" in sys.argv:
            shifted = shifted.to(torch.bfloat16)
        return model(shifted)


def receive():
    values = torch.full((2, 8), 0.5)
    return Request(values)


def build():
    table = torch.linspace(0, 1, 8)
    return Guide(table, 2.0)


def answer(model, request):
    prompt = request.prompt
    if "repaired" in sys.argv:
        prompt = prompt.to(torch.bfloat16)
    return model(prompt)


model = nn.Linear(8, 8).to(torch.bfloat16)
if "request" in sys.argv:
    answer(model, receive())
build().apply(
    model, answer(model, receive()) if "repaired" in sys.argv else torch.ones(2, 8).bfloat16()
)
