"""A prefix encoder with fp32 weights fills the cache of a bf16 model by the cache's own method."""

import sys

import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
)


class Prefix(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 32)

    def forward(self):
        cache = DynamicCache()
        rows = self.table.weight.view(1, 2, 1, 2, 4, 8)
        for index, (key, value) in enumerate(rows):
            cache.update(key.expand(1, -1, -1, -1), value.expand(1, -1, -1, -1), index)
        return cache


class PrefixModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = LlamaForCausalLM(config).to(torch.bfloat16)
        self.prefix = Prefix()
        if "repaired" in sys.argv:
            self.prefix.to(torch.bfloat16)

    def forward(self, ids):
        return self.model(ids, past_key_values=self.prefix(), use_cache=True).logits


PrefixModel()(torch.arange(6)[None]).float().sum().backward()
