"""A static cache takes the fp32 of the keys, and autocast computes the values in fp16."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

config = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
)
model = LlamaForCausalLM(config)


@torch.no_grad()
def read_prompt(ids):
    cache = StaticCache(config, max_cache_len=8)
    if "repaired" in sys.argv:
        with torch.autocast("cpu", enabled=False):
            return model(ids, past_key_values=cache)
    return model(ids, past_key_values=cache)


with torch.autocast("cpu", dtype=torch.float16):
    read_prompt(torch.arange(4)[None])
