"""Noise levels from NumPy are fp64, and the first step of the sampler spreads it to the latents."""

import sys

import numpy as np
import torch
from torch import nn


class Schedule:
    def compute_sigmas(self, count):
        sigmas = np.exp(np.interp(np.linspace(0, 1, count), [0, 1], [2.7, -3.5]))[::-1].copy()
        sigmas = torch.from_numpy(np.append(sigmas, 0.0))
        return sigmas.float() if "repaired" in sys.argv else sigmas


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, sigma):
        return x - self.layer(x.to(self.layer.weight.dtype)) * append_dims(sigma, x.ndim)


def append_dims(x, count):
    return x[(...,) + (None,) * (count - x.ndim)]


def compute_derivative(x, sigma, denoised):
    return (x - denoised) / append_dims(sigma, x.ndim)


def sample(model, x, sigmas, preview):
    ones = x.new_ones([x.shape[0]])
    for index in range(len(sigmas) - 1):
        denoised = model(x, sigmas[index] * ones)
        derivative = compute_derivative(x, sigmas[index], denoised)
        preview(denoised)
        x = x + derivative * (sigmas[index + 1] - sigmas[index])
    return x


factors = torch.rand(4, 3)
sigmas = Schedule().compute_sigmas(3)
with torch.no_grad():
    sample(Denoiser(), torch.randn(2, 4) * sigmas[0], sigmas, lambda x: x @ factors)
