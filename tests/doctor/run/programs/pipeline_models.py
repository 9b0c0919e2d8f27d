"""A pipeline holds a text encoder in fp32 and a smaller transformer in bf16; the noise takes the
dtype of the text encoder's result.
"""

import sys

import torch
from torch import nn

torch.manual_seed(0)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.block = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, noise):
        return self.head(self.block(self.embed(noise)))


class Pipeline(nn.Module):
    def __init__(self):
        super().__init__()
        self.text_encoder = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16))
        self.transformer = Transformer().to(torch.bfloat16)

    def forward(self, ids):
        hidden = self.text_encoder(ids)
        noise = torch.randn(2, 4, dtype=hidden.dtype)
        if "repaired" in sys.argv:
            noise = noise.to(torch.bfloat16)
        return self.transformer(noise)


print(Pipeline()(torch.arange(3)[None]).shape)
