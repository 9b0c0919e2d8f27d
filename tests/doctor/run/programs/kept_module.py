"""A class of transformers keeps its gate in fp32, and the forward does not cast the gate's input."""

import sys
import tempfile

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class Gated(PreTrainedModel):
    config_class = PretrainedConfig
    _keep_in_fp32_modules_strict = ["gate"]

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        self.gate = nn.Linear(4, 4)
        self.post_init()

    def forward(self, x):
        hidden = self.layers(x)
        if "repaired" in sys.argv:
            return self.gate(hidden.float())
        return self.gate(hidden)


with tempfile.TemporaryDirectory() as folder:
    Gated(PretrainedConfig()).to(torch.bfloat16).save_pretrained(folder)
    model = Gated.from_pretrained(folder, dtype=torch.bfloat16)
model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
