"""A pipeline's denoiser is cast to fp16, and no call casts its decoder, which stays in fp32."""

import sys

import torch
from torch import nn


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 8)

    def forward(self, x):
        return self.net(x)


class Decoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 16)

    def forward(self, latents):
        return self.up(latents)


class Pipeline:
    def __init__(self, denoiser, decoder):
        self.denoiser, self.decoder = denoiser, decoder

    def __call__(self, noise):
        latents = self.denoiser(noise)
        if "repaired" in sys.argv:
            latents = latents.to(torch.float32)
        return self.decoder(latents)


def build():
    denoiser = Denoiser().half()
    return Pipeline(denoiser, Decoder(8))


build()(torch.randn(2, 8, dtype=torch.float16))
