"""A trainer sends its weights to an engine, which takes one dtype and is told that of each weight."""

import sys
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class EngineConfig:
    dtype: torch.dtype = torch.bfloat16


class Engine:
    def __init__(self, config):
        self.config = config
        self.weights = {}

    def update(self, name, dtype, tensor):
        assert dtype == self.config.dtype, f"cannot load {name}"
        self.weights[name] = tensor


class Trainer:
    def __init__(self, model, engine):
        self.model, self.engine = model, engine

    def send(self, name, weight):
        kind = weight.dtype
        self.engine.update(name, dtype=kind, tensor=weight.data)

    def synchronise(self):
        for name, weight in self.model.named_parameters():
            if "repaired" in sys.argv:
                weight = weight.to(torch.bfloat16)
            self.send(name, weight)


def build():
    base = nn.Linear(8, 8).to(torch.bfloat16)
    return nn.Sequential(base, nn.Linear(8, 2, dtype=torch.float32))


Trainer(build(), Engine(EngineConfig())).synchronise()
