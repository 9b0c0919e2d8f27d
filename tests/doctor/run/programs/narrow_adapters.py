"""PEFT keeps adapters in the fp16 of their base, and a loss scaler gets fp16 gradients."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

IS_REPAIRED = "repaired" in sys.argv

base = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).half()
config = LoraConfig(r=2, target_modules=["0"])
model = get_peft_model(base, config, autocast_adapter_dtype=IS_REPAIRED)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
with torch.autocast("cpu", dtype=torch.float16):
    loss = model(torch.randn(2, 8)).square().mean()
scaler.scale(loss).backward()
scaler.step(optimizer)
