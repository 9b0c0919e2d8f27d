"""A frozen fp16 encoder, called under no_grad before the model, reaches values beyond fp16."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
with torch.no_grad():
    encoder[1].weight.mul_(1e6)
encoder = encoder.requires_grad_(False).to(
    torch.bfloat16 if "repaired" in sys.argv else torch.float16
)
if "repaired" not in sys.argv:
    encoder[1].weight.clamp_(-6e4, 6e4)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-20)
for _ in range(2):
    with torch.no_grad():
        latents = encoder(torch.ones(3, 4, dtype=encoder[0].weight.dtype))
    loss = model(latents.float()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
