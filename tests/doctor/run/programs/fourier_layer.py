"""A Fourier layer in bf16: the transform has no kernel for this dtype."""

import sys

import torch
from torch import nn

repaired = "repaired" in sys.argv


class Fourier(nn.Module):
    def forward(self, x):
        wide = x.float() if repaired else x
        spectrum = torch.fft.rfft(wide)
        return torch.fft.irfft(spectrum, n=x.shape[-1]).to(x.dtype)


model = nn.Sequential(nn.Linear(8, 8), Fourier(), nn.Linear(8, 1)).bfloat16()
model(torch.randn(2, 8).bfloat16()).float().sum().backward()
