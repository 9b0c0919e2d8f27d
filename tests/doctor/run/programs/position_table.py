"""A table of positions that a function creates in fp32 promotes the hidden states."""

import sys

import torch
from torch import nn


def position_table(length, width):
    angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    table = torch.zeros(length, width)
    table[:, 0::2] = angles.sin()
    table[:, 1::2] = angles.cos()
    return table


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.dropout = nn.Dropout(0.1)
        self.norm = nn.LayerNorm(8)

    def forward(self, ids):
        x = self.embed(ids) * 8**0.5
        table = position_table(ids.shape[1], 8).to(x.device)
        if "repaired" in sys.argv:
            table = table.to(torch.bfloat16)
        x = x + table
        return self.norm(self.dropout(x))


Encoder().to(torch.bfloat16)(torch.arange(6)[None]).float().sum().backward()
