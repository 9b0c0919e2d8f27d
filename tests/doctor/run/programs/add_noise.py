"""A scheduler adds fp32 noise to bf16 latents, and the model is bf16."""

import sys

import torch
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from torch import nn

scheduler = DDPMScheduler()
model = nn.Conv2d(4, 4, 3, padding=1).to(torch.bfloat16)
latents = torch.randn(2, 4, 8, 8).to(torch.bfloat16)
dtype = latents.dtype if "repaired" in sys.argv else torch.float32
noise = torch.randn(latents.shape, dtype=dtype)
noisy = scheduler.add_noise(latents, noise, torch.tensor([10, 20]))
model(noisy).sum().backward()
