"""The initial state of a recurrent layer is created without a dtype."""

import sys

import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.rnn = nn.GRU(4, 4)

    def forward(self, ids):
        start = torch.zeros(1, ids.shape[1], 4)
        if "repaired" in sys.argv:
            start = start.to(torch.bfloat16)
        return self.rnn(self.embed(ids), start)[0]


model = Tagger().to(torch.bfloat16)
model(torch.zeros(3, 2, dtype=torch.long)).float().sum().backward()
