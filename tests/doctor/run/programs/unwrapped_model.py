"""An evaluation removes accelerate's autocast from the model."""

import sys

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

AcceleratorState._reset_state(reset_partial_state=True)  # of programs in the same process
accelerator = Accelerator(mixed_precision="bf16", cpu=True)
model = nn.Sequential(nn.Linear(4, 4).to(torch.bfloat16), nn.Linear(4, 2))
model = accelerator.prepare(model)
model(torch.randn(2, 4, dtype=torch.bfloat16))
if "repaired" in sys.argv:
    unwrapped = accelerator.unwrap_model(model)
else:
    unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
unwrapped(torch.randn(2, 4, dtype=torch.bfloat16))
