"""A bf16 checkpoint is assigned to an fp32 model, which then computes in bf16."""

import sys

import torch
from torch import nn

checkpoint = {name: value.bfloat16() for name, value in nn.Linear(4, 2).state_dict().items()}
model = nn.Linear(4, 2)
model.load_state_dict(checkpoint, assign=True)
if "repaired" in sys.argv:
    model.float()
features = torch.randn(3, 4)
model(features)
