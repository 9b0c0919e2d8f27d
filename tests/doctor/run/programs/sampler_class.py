"""The fp32 noise levels of a sampler promote the latents for its second step."""

import sys

import torch
from torch import nn


class Sampler:
    def __init__(self):
        self.levels = torch.linspace(1.0, 0.0, 3, dtype=torch.float32)

    def level(self, index):
        level = self.levels[index.clamp(min=0)]
        return level.view(-1, 1)

    def step(self, velocity, index, latents):
        return latents - self.level(index).sqrt() * velocity


class Generator:
    def __init__(self, model, sampler):
        self.model, self.sampler = model, sampler

    @property
    def dtype(self):
        return self.model.weight.dtype

    def initial(self):
        return torch.randn(2, 4).to(self.dtype)

    def generate(self):
        latents = self.initial()
        for index in torch.arange(2):
            if "repaired" in sys.argv:
                latents = latents.to(torch.bfloat16)
            velocity = self.model(latents)
            latents = self.sampler.step(velocity, index, latents)


Generator(nn.Linear(4, 4).to(torch.bfloat16), Sampler()).generate()
