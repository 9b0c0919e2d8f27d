"""A compiled bf16 model gets fp32 images; the operator fails in the compiled code."""

import sys

import torch
from torch import nn

model = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU()).to(torch.bfloat16)
compiled = torch.compile(model, backend="aot_eager")
images = torch.rand(2, 2, 3)
if "repaired" in sys.argv:
    images = images.to(torch.bfloat16)
compiled(images)
