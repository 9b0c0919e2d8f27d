"""A table that an object of a library holds promotes bf16 latents to fp32."""

import sys
from types import SimpleNamespace

import torch
from torch import nn

schedule = SimpleNamespace(sigmas=torch.linspace(1.0, 0.1, 4))


def get_sigmas(steps):
    return schedule.sigmas[steps].reshape(-1, 1)


model = nn.Linear(8, 8).to(torch.bfloat16)
latents = torch.randn(2, 8, dtype=torch.bfloat16)
noise = torch.randn(2, 8, dtype=torch.bfloat16)
noisy = latents + get_sigmas(torch.tensor([0, 2])) * noise
if "repaired" in sys.argv:
    noisy = noisy.to(torch.bfloat16)
model(noisy).sum().backward()
