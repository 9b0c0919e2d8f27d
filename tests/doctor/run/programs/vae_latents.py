"""fp32 latents enter an fp16 decoder."""

import sys

import torch
from torch import nn


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in = nn.Conv2d(4, 8, 3, padding=1)
        self.conv_out = nn.Conv2d(8, 3, 3, padding=1)

    def decode(self, latents):
        return self.conv_out(self.conv_in(latents))


vae = Decoder().half()
noise = torch.randn(1, 4, 4, 4)
latents = noise * 0.18215
if "repaired" in sys.argv:
    latents = latents.to(torch.float16)
with torch.no_grad():
    vae.decode(latents)
