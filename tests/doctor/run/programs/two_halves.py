"""A model in fp16 gets bf16 inputs."""

import sys

import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)).half()
batch = {"pixels": torch.rand(3, 8)}
batch = {name: value.to(torch.bfloat16) for name, value in batch.items()}
pixels = batch["pixels"]
if "repaired" in sys.argv:
    pixels = pixels.to(torch.float16)
model(pixels).float().sum().backward()
