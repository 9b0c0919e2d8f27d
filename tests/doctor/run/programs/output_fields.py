"""A field of the object that an encoder returns was computed in fp32."""

import sys
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Encoded:
    states: torch.Tensor
    pooled: torch.Tensor


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)

    def forward(self, pixels):
        states = self.patch(pixels).flatten(2).transpose(1, 2)
        return Encoded(states=states, pooled=states.float().mean(1))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(8, 2)

    def forward(self, pixels):
        encoded = self.encoder(pixels)
        if "repaired" in sys.argv:
            encoded.pooled = encoded.pooled.to(torch.bfloat16)
        return self.head(encoded.pooled)


Classifier().to(torch.bfloat16)(torch.rand(1, 3, 8, 8).to(torch.bfloat16))
