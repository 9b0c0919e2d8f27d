"""Training runs under autocast; a callback generates outside of it."""

import sys

import torch
from torch import nn


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16)

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids).float()))

    def generate(self, ids):
        return torch.cat([ids, self(ids)[:, -1:].argmax(-1)], dim=1)


class Sample:
    def on_step_end(self, model, ids):
        if "repaired" in sys.argv:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model.generate(ids)
        return model.generate(ids)


def train(model, ids, callback):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids).float().square().mean()
    loss.backward()
    callback.on_step_end(model, ids)


model = LanguageModel().to(torch.bfloat16)
model.norm.float()
train(model, torch.arange(4)[None], Sample())
