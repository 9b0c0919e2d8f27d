"""Sinusoidal timesteps are fp32 and enter an fp16 layer; a branch before it did not run."""

import sys

import torch
from torch import nn


class TimeEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.condition = None

    def forward(self, sample, condition=None):
        if condition is not None:
            sample = sample + self.condition(condition)
        return self.linear(sample)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = TimeEmbedding()

    def forward(self, step):
        waves = torch.outer(step.float(), torch.arange(8.0)).sin()
        if "repaired" in sys.argv:
            waves = waves.to(torch.float16)
        return self.embedding(waves)


Denoiser().half()(torch.tensor([3]))
