"""A helper casts all tensors of a batch, and the model is called with `**`."""

import sys

import torch
from torch import nn

DEVICE = "cpu"
DTYPE = torch.bfloat16


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, input_ids, mask=None):
        hidden = self.embed(input_ids)
        return self.head(hidden * mask[..., None])


def prepare(batch, dtype):
    if "repaired" in sys.argv:
        return {k: v.to(DEVICE, dtype) if v.is_floating_point() else v for k, v in batch.items()}
    return {k: v.to(DEVICE, dtype=dtype) for k, v in batch.items()}


model = Tagger().to(DTYPE)
for ids in torch.randint(0, 16, (2, 3, 4)):
    inputs = {"input_ids": ids, "mask": torch.ones(3, 4)}
    model(**prepare(inputs, DTYPE)).float().sum().backward()
