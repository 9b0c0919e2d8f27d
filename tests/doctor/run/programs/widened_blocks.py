"""A decoder is fp16, and a class that replaces its blocks makes most of its weights fp32."""

import sys

import torch
from torch import nn
from torch.nn import functional as F


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)])
        self.last = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, latents):
        hidden = F.silu(self.blocks(latents))
        if "repaired" in sys.argv:
            hidden = hidden.to(torch.float16)
        return self.last(hidden)


class WideBlocks(nn.Module):
    def __init__(self, decoder):
        super().__init__()
        self.original = decoder.blocks
        self.original.float()

    def forward(self, latents):
        return self.original(latents.to(self.original[0].weight.dtype))


decoder = Decoder()
decoder.half()
decoder.blocks = WideBlocks(decoder)
with torch.no_grad():
    decoder(torch.ones(1, 8, 4, 4, dtype=torch.float16))
