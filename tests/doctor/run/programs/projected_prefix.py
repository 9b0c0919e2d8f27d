"""The output of an fp32 projector is joined with bf16 embeddings, in front of a library's model."""

import sys

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)


class AudioModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.language = LlamaForCausalLM(config).to(torch.bfloat16)
        self.projector = nn.Sequential(nn.Linear(6, 16), nn.GELU())

    def forward(self, audio, ids):
        prefix = self.projector(audio)
        words = self.language.get_input_embeddings()(ids)
        hidden = torch.cat([prefix, words], dim=1)
        if "repaired" in sys.argv:
            hidden = hidden.to(torch.bfloat16)
        return self.language(inputs_embeds=hidden).logits


AudioModel()(torch.randn(1, 3, 6), torch.arange(4)[None]).float().sum().backward()
