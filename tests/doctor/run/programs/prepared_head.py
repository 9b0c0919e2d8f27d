"""PEFT's preparation casts a backbone to fp32; the head that is added after it is bf16."""

import sys

import torch
from peft import prepare_model_for_kbit_training
from torch import nn

HEAD_DTYPE = torch.float32 if "repaired" in sys.argv else torch.bfloat16


def load_backbone():
    backbone = nn.Sequential(nn.Embedding(32, 16), nn.LayerNorm(16)).to(torch.bfloat16)
    backbone.is_loaded_in_4bit = True
    return prepare_model_for_kbit_training(backbone, use_gradient_checkpointing=False)


class Scorer(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.score = nn.Linear(16, 1, dtype=HEAD_DTYPE)

    def forward(self, ids):
        hidden = self.backbone(ids).mean(1)
        return self.score(hidden)


model = Scorer(load_backbone())
model(torch.arange(8)[None]).sum().backward()
